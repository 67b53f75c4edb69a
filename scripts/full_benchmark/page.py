"""Writes docs/benchmark.md from the rows of a benchmark; nothing on the page is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.compared import markdown
from benchmarks.noise import noise_of, task_of
from full_benchmark.analysis import (
    PREDICTED_TIE,
    compare,
    exponent,
    figures,
    first_or_tied,
    sharders_of,
    tie_margin,
)
from full_benchmark.claims import CLAIMS, Rows
from full_benchmark.page_clusters import (
    production_section,
    published_section,
    simulated_section,
)
from full_benchmark.planned import LIMIT_S
from studies.study import Row

REFERENCE = "neuroshard"
INFEASIBLE = "infeasible"


def page(rows: Rows, conditions: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        conditions: hardware, versions and loads by name.
        pictures: paths of the pictures by name, relative to the page.
    """
    sections = [
        _opening(conditions),
        _claims(rows),
        _measured(rows.get("measured", [])),
        _picture("measured", "measured cost by sharder", pictures),
        _trained(rows.get("trained", [])),
        production_section(rows.get("production", [])),
        _picture("production", "predicted cost of the production model by sharder", pictures),
        simulated_section(rows.get("simulated", [])),
        published_section(rows.get("published_steps", [])),
        *_planned(rows.get("planned", [])),
        _scaling(rows.get("scaling", [])),
        _picture("scaling", "seconds to plan", pictures),
        _files(conditions),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _picture(name: str, text: str, pictures: Mapping[str, str]) -> str:
    return f"![{text}]({pictures[name]})" if name in pictures else ""


def _opening(conditions: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {value} |" for name, value in conditions.items()]
    return "\n".join(
        [
            "# Benchmark",
            "",
            "`make benchmark` writes this page and everything on it. A heading says whether its "
            "figures were *measured* on the machine below, *predicted* by a cost model, or "
            "*simulated*: measured rank by rank on one device, with predicted exchanges. Every "
            "figure is a fact about this machine; on yours, run `make calibrate` and then the "
            "command. How each figure is made, and more of them, is in "
            "[the measurements](notes/measurements.md).",
            "",
            "| condition | |",
            "|---|---|",
            *lines,
        ]
    )


def _claims(rows: Rows) -> str:
    lines = []
    for claim in CLAIMS:
        found = claim.find(rows)
        verdict = "not run" if found.value is None else "holds" if found.holds else "does not hold"
        lines.append([claim.source, claim.text, found.value or "-", found.on, verdict])
    header = ["source", "claim", "found", "on", "verdict"]
    return f"## The papers' claims, and ours\n\n{markdown(header, lines)}"


def _measured(rows: Sequence[Row]) -> str:
    """Write the measured costs for each number of ranks, and the tasks that are lost."""
    if not rows:
        return ""
    noise = noise_of(rows, "rounds_ms")
    margin = tie_margin(noise)
    texts = [
        "## Embedding cost (computation measured, exchanges predicted)",
        "Each rank of a plan is looked up by itself on one device, in rounds of random order. A "
        f"median of rounds is off by {100 * noise:.1f} % (one standard error, from the rounds of "
        f"this run), so differences below {100 * margin:.1f} % are ties.",
    ]
    for world_size in sorted({row["world_size"] for row in rows}):
        of_size = [row for row in rows if row["world_size"] == world_size]
        texts += [f"### {world_size} ranks", _against_reference(of_size, margin)]
        texts.append(_what_a_plan_can_change(of_size))
    others = len(sharders_of(rows)) - 1
    texts.append(_losses(rows, tie_margin(noise, others=max(1, others))))
    return "\n\n".join(texts)


def _against_reference(rows: Sequence[Row], margin: float) -> str:
    measured, predicted = figures(rows, "cost_ms"), figures(rows, "predicted_ms")
    lines = []
    for sharder in sharders_of(rows):
        against = compare(measured, sharder, REFERENCE, margin=margin)
        lines.append(
            [
                sharder,
                f"{len(measured[sharder])}/{sum(row['sharder'] == sharder for row in rows)}",
                _ratio(against.ratio),
                _ratio(compare(predicted, sharder, REFERENCE, margin=PREDICTED_TIE).ratio),
                against.score,
            ]
        )
    header = ["sharder", "plans", f"measured / {REFERENCE}", "predicted", "wins/ties/losses"]
    return markdown(header, lines)


def _what_a_plan_can_change(rows: Sequence[Row]) -> str:
    """Say how much of the cost is exchanges, and what the reference gains on computation alone."""
    costs, computation = figures(rows, "cost_ms"), figures(rows, "compute_ms")
    own = computation[REFERENCE]
    exchanges = [1 - own[task] / costs[REFERENCE][task] for task in own]
    found = computation.get("random", {})
    logs = [math.log(found[task] / own[task]) for task in own if task in found]
    if not logs:
        return ""
    return (
        f"Exchanges are {100 * np.mean(exchanges):.0f} % of {REFERENCE}'s cost, and every plan of "
        "whole tables sends as many bytes in all. On the computation of the slowest rank alone, "
        f"random takes {math.exp(float(np.mean(logs))):.2f} times as long."
    )


def _losses(rows: Sequence[Row], margin: float) -> str:
    """Say on how many tasks the reference is first or tied, and why not on the others."""
    measured, predicted = figures(rows, "cost_ms"), figures(rows, "predicted_ms")
    first, behind = first_or_tied(measured, REFERENCE, margin=margin)
    num_tasks = len(first) + len(behind)
    lines = [
        f"{REFERENCE} is first or tied on {len(first)} of {num_tasks} tasks; the luckiest of the "
        f"others is ahead by up to {100 * margin:.1f} % by noise alone."
    ]
    for task in behind:
        best = min((s for s in measured if task in measured[s]), key=lambda s: measured[s][task])
        if task not in measured[REFERENCE]:
            lines.append(f"On task {_name(task)} it finds no plan, and {best} does.")
            continue
        behind_by = measured[REFERENCE][task] / measured[best][task] - 1
        errors = [predicted[s][task] / measured[s][task] - 1 for s in (REFERENCE, best)]
        cause = (
            f"the prices hold its own plan for {100 * errors[0]:+.0f} % and the other one for "
            f"{100 * errors[1]:+.0f} % of what is measured"
        )
        if predicted[REFERENCE][task] > predicted[best][task] * (1 + PREDICTED_TIE):
            cause = "its search does not find the other plan, which the prices prefer"
        lines.append(f"On task {_name(task)}, {best} is {100 * behind_by:.1f} % cheaper: {cause}.")
    return "\n".join(lines)


def _trained(rows: Sequence[Row]) -> str:
    """Write the measured steps of each model, as throughput over the reference's."""
    if not rows:
        return ""
    for row in rows:
        row["median_ms"] = float(np.median(row["step_ms"]))
    noise = noise_of(rows, "step_ms")
    margin = tie_margin(noise)
    steps = figures(rows, "median_ms")
    lines = []
    for sharder in sharders_of(rows):
        against = compare(steps, sharder, REFERENCE, margin=margin)
        errors = [
            abs(math.log(row["predicted_ms"] / row["median_ms"]))
            for row in rows
            if row["sharder"] == sharder
        ]
        lines.append(
            [
                sharder,
                _ratio(1 / against.ratio),
                against.score,
                f"{100 * math.expm1(float(np.mean(errors))):.1f}",
            ]
        )
    header = ["sharder", f"samples/s / {REFERENCE}", "wins/ties/losses", "error of prediction, %"]
    models = len({row["number"] for row in rows})
    seeds = len({row["seed"] for row in rows})
    return "\n\n".join(
        [
            "## Training (measured)",
            f"{models} random models, each drawn with {seeds} seeds, on {rows[0]['world_size']} "
            "ranks of this machine, trained in turns in one job. A median is off by "
            f"{100 * noise:.1f} %, so differences below {100 * margin:.1f} % are ties.",
            markdown(header, lines),
        ]
    )


def _planned(rows: Sequence[Row]) -> Iterator[str]:
    """Write a table for each set of tasks."""
    for task_set in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == task_set]
        feasible = [row for row in of_set if row["kind"] != INFEASIBLE]
        gpu = of_set[0]["gpu"]
        priced = f"the prior of {gpu}" if gpu else "the packaged prices of a CPU"
        sizes = sorted({row["world_size"] for row in of_set})
        ranks = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        yield "\n\n".join(
            [
                f"## Plans of the set `{task_set}` (predicted)",
                f"{len({task_of(row) for row in of_set})} tasks on {ranks} ranks, under {priced}. "
                f"A sharder that takes more than {LIMIT_S:g} s has no plan, which is a loss.",
                _plans_table(feasible),
                _cheaper_plans(feasible),
                _refusals([row for row in of_set if row["kind"] == INFEASIBLE]),
            ]
        ).strip()


def _plans_table(rows: Sequence[Row]) -> str:
    costs = figures(rows, "cost_ms")
    bounds: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row["lower_bound_ms"] is not None:
            bounds[task_of(row)] = max(bounds.get(task_of(row), 0.0), row["lower_bound_ms"])
    lines = []
    for sharder in sharders_of(rows):
        own = [row for row in rows if row["sharder"] == sharder]
        against = compare(costs, sharder, REFERENCE, margin=PREDICTED_TIE)
        gaps = [cost / bounds[task] - 1 for task, cost in costs[sharder].items() if task in bounds]
        solve_s = [row["solve_s"] for row in own]
        lines.append(
            [
                sharder,
                f"{len(costs[sharder])}/{len(own)}",
                _ratio(against.ratio),
                against.score,
                f"{100 * np.mean(gaps):.1f}, {100 * max(gaps):.1f}" if gaps else "-",
                f"{np.mean(solve_s):.2f}, {max(solve_s):.2f}",
            ]
        )
    header = ["sharder", "plans", f"cost / {REFERENCE}", "wins/ties/losses"]
    header += ["above the bound, %: mean, worst", "s to plan: mean, worst"]
    return markdown(header, lines)


def _cheaper_plans(rows: Sequence[Row]) -> str:
    """Say on which tasks the reference is not first; the prices are the same for all sharders."""
    costs, num_shards = figures(rows, "cost_ms"), figures(rows, "num_shards")
    first, behind = first_or_tied(costs, REFERENCE, margin=PREDICTED_TIE)
    lines = [f"{REFERENCE} is first or tied on {len(first)} of {len(first) + len(behind)} tasks."]
    for task in behind:
        best = min((s for s in costs if task in costs[s]), key=lambda s: costs[s][task])
        if task not in costs[REFERENCE]:
            lines.append(f"On task {_name(task)} it finds no plan, and {best} does.")
            continue
        behind_by = 100 * (costs[REFERENCE][task] / costs[best][task] - 1)
        cause = "the search does not find its plan"
        if (most := num_shards[best][task]) > (fewer := num_shards[REFERENCE][task]):
            cause = (
                f"it splits or replicates more ({most:,.0f} shards instead of {fewer:,.0f}), which "
                f"{REFERENCE} does only for a gain above the error of the prices "
                "(`sharder.split_error`)"
            )
        lines.append(f"On task {_name(task)}, {best} is {behind_by:.1f} % cheaper: {cause}.")
    return "\n".join(lines)


def _refusals(rows: Sequence[Row]) -> str:
    """Say whether the sharders refuse tasks that no plan fits."""
    if not rows:
        return ""
    accepted = sorted({row["sharder"] for row in rows if not row["refused"]})
    tasks = len({task_of(row) for row in rows})
    if not accepted:
        return f"All sharders refuse the {tasks} tasks that no plan fits."
    return f"Of the {tasks} tasks that no plan fits, not all are refused by {', '.join(accepted)}."


def _scaling(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = []
    for axis, key in (("tables", "num_tables"), ("ranks", "world_size")):
        for sharder in sharders_of(rows):
            points = sorted(
                (row[key], row["solve_s"])
                for row in rows
                if row["axis"] == axis and row["sharder"] == sharder and row["cost_ms"]
            )
            failed = [
                row[key]
                for row in rows
                if row["axis"] == axis and row["sharder"] == sharder and not row["cost_ms"]
            ]
            times = ", ".join(f"{size:,}: {seconds:.2f}" for size, seconds in points)
            slope = exponent(points)
            lines.append(
                [
                    axis,
                    sharder,
                    times or "-",
                    "-" if math.isnan(slope) else f"{slope:.2f}",
                    ", ".join(f"{size:,}" for size in failed) or "-",
                ]
            )
    header = ["axis", "sharder", "s to plan, by size", "exponent", "no plan for"]
    return "\n\n".join(
        [
            "## How planning time grows (measured)",
            "The exponent is the slope of a line through the points on a log-log scale. neuroshard "
            "returns the best plan that it has after `sharder.time_budget_s=10`, so from there on "
            "its time says nothing; how far its plans are from the bound, the tables above say.",
            markdown(header, lines),
        ]
    )


def _files(conditions: Mapping[str, Any]) -> str:
    return (
        "## Data\n\nEvery row is in `results.parquet` and `results.csv` of the benchmark's folder "
        "(`benchmark/` by default), beside the pictures and a TensorBoard run."
    )


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _name(task: Iterable[object]) -> str:
    return " ".join(str(part) for part in task if part is not None)
