"""The papers' claims, and what this benchmark found of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.noise import noise_of
from full_benchmark.analysis import compare, figures, first_or_tied, tie_margin
from full_benchmark.planned import PAPER_ON_GPUS
from full_benchmark.production import throughput_gain
from studies.study import Row

HEURISTICS = ("random", "size", "dim", "lookup", "size_lookup")
HUNDREDS = 100
"""Smallest number of tables that counts as hundreds."""

LEAST_FIRST = 0.95

Rows = Mapping[str, Sequence[Row]]
"""Rows by study."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The evidence for or against a claim.

    Args:
        value: what was found; None if the rows that it needs are missing.
        on: tasks and hardware.
    """

    value: str | None
    on: str
    holds: bool = False


NOTHING = Finding(None, "-")


@dataclass(frozen=True, slots=True)
class Claim:
    source: str
    text: str
    find: Callable[[Rows], Finding]


def _production_ratio(sharder: str, over: str, least: float) -> Callable[[Rows], Finding]:
    def find(rows: Rows) -> Finding:
        costs = _production_costs(rows)
        for row in rows.get("production", []):
            if row["sharder"] in (sharder, over) and row["cost_ms"] is None:
                return Finding(f"{row['sharder']} finds no plan: {row['error']}", "-")
        if sharder not in costs or over not in costs:
            return NOTHING
        ratio = costs[over] / costs[sharder]
        text = f"{ratio:.2f} x ({costs[over]:.2f} against {costs[sharder]:.2f} ms)"
        return Finding(text, _production_on(rows), ratio >= least)

    return find


def _production_gain(rows: Rows) -> Finding:
    costs = _production_costs(rows)
    if not {"random", "neuroshard"} <= costs.keys():
        return NOTHING
    gain = throughput_gain(costs["neuroshard"], costs["random"])
    return Finding(
        f"+{100 * gain:.1f} %, if the rest of the step is that of the paper",
        _production_on(rows),
        gain >= 0.549,
    )


def _production_costs(rows: Rows) -> dict[str, float]:
    return {
        row["sharder"]: row["cost_ms"]
        for row in rows.get("production", [])
        if row["cost_ms"] is not None
    }


def _production_on(rows: Rows) -> str:
    row = rows["production"][0]
    return f"{row['num_tables']:,} tables, {row['world_size']} {row['gpu']}, predicted by the prior"


def _solve_time(sharder: str, most_s: float) -> Callable[[Rows], Finding]:
    def find(rows: Rows) -> Finding:
        found = [
            row
            for row in rows.get("scaling", [])
            if row["sharder"] == sharder and row["num_tables"] >= HUNDREDS and row["cost_ms"]
        ]
        if not found:
            return NOTHING
        slowest = max(found, key=lambda row: row["solve_s"])
        return Finding(
            f"at most {slowest['solve_s']:.2f} s",
            f"{min(row['num_tables'] for row in found):,} to "
            f"{max(row['num_tables'] for row in found):,} tables, measured here",
            slowest["solve_s"] < most_s,
        )

    return find


def _over_heuristics(sharder: str, least_gain: float) -> Callable[[Rows], Finding]:
    """Find the largest gain over the best heuristic of a task, as the paper states it."""

    def find(rows: Rows) -> Finding:
        measured = rows.get("measured", [])
        costs = figures(measured, "cost_ms")
        heuristics = [costs[name] for name in HEURISTICS if name in costs]
        gains = [
            min(of_heuristic[task] for of_heuristic in heuristics) / cost - 1
            for task, cost in costs.get(sharder, {}).items()
            if all(task in of_heuristic for of_heuristic in heuristics)
        ]
        if not gains or not heuristics:
            return NOTHING
        return Finding(
            f"{100 * max(gains):+.0f} % at most, {100 * float(np.mean(gains)):+.0f} % in the mean",
            f"{len(gains)} tasks, computation measured here",
            max(gains) >= least_gain,
        )

    return find


def _measured_ratio(sharder: str, world_size: int, least: float) -> Callable[[Rows], Finding]:
    """Find the mean ratio of a sharder's measured cost to neuroshard's."""

    def find(rows: Rows) -> Finding:
        found = [row for row in rows.get("measured", []) if row["world_size"] == world_size]
        costs = figures(found, "cost_ms")
        both = costs.get(sharder, {}).keys() & costs.get("neuroshard", {}).keys()
        if not both:
            return NOTHING
        logs = [math.log(costs[sharder][task] / costs["neuroshard"][task]) for task in both]
        ratio = math.exp(float(np.mean(logs)))
        return Finding(
            f"{ratio:.3f} x (noise +-{100 * noise_of(found, 'rounds_ms'):.1f} %)",
            f"{len(both)} tasks on {world_size} ranks, computation measured here",
            ratio >= least,
        )

    return find


def _first(rows: Rows) -> Finding:
    """Find on how many measured tasks no sharder is cheaper than neuroshard by more than noise."""
    found = rows.get("measured", [])
    costs = figures(found, "cost_ms")
    if "neuroshard" not in costs:
        return NOTHING
    margin = tie_margin(noise_of(found, "rounds_ms"), others=len(costs) - 1)
    first, behind = first_or_tied(costs, "neuroshard", margin=margin)
    num_tasks = len(first) + len(behind)
    return Finding(
        f"{len(first)} of {num_tasks}",
        f"tasks on {_range(row['world_size'] for row in found)} ranks, computation measured here",
        len(first) >= LEAST_FIRST * num_tasks,
    )


def _priced_ratio(sharder: str, task_set: str, least: float) -> Callable[[Rows], Finding]:
    """Find the mean ratio of a sharder's predicted cost to neuroshard's on GPUs."""

    def find(rows: Rows) -> Finding:
        found = [row for row in rows.get("planned", []) if row["set"] == task_set]
        ratio = (
            compare(figures(found, "cost_ms"), sharder, "neuroshard", margin=0.0) if found else None
        )
        if ratio is None or not ratio.num_both:
            return NOTHING
        ranks = _range(row["world_size"] for row in found)
        return Finding(
            f"{ratio.ratio:.3f} x",
            f"{ratio.num_both} tasks of DreamShard's kind on {ranks} {found[0]['gpu']}, predicted "
            "by the prior",
            ratio.ratio >= least,
        )

    return find


def _policies_transfer(sharder: str) -> Callable[[Rows], Finding]:
    """Find what a policy costs against the best heuristic on published models it never saw."""

    def find(rows: Rows) -> Finding:
        costs = figures([r for r in rows.get("planned", []) if r["set"] == "models"], "cost_ms")
        heuristics = [costs[name] for name in HEURISTICS if name in costs]
        logs = [
            math.log(cost / min(h[task] for h in heuristics if task in h))
            for task, cost in costs.get(sharder, {}).items()
            if any(task in h for h in heuristics)
        ]
        if not logs:
            return NOTHING
        ratio = math.exp(float(np.mean(logs)))
        return Finding(
            f"{ratio:.3f} of the best heuristic's cost",
            f"{len(logs)} published models, predicted",
            ratio <= 1 + tie_margin(0.0),
        )

    return find


def _range(numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    return f"{ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else f"{ordered[0]}"


NEUROSHARD = "NeuroShard (arXiv:2305.01868)"
DREAMSHARD = "DreamShard (arXiv:2210.02023)"
AUTOSHARD = "AutoShard (arXiv:2208.06399)"

CLAIMS = (
    Claim(
        NEUROSHARD,
        "random costs 2.14 x as much on the production model",
        _production_ratio("neuroshard", "random", 118.3 / 55.2),
    ),
    Claim(
        NEUROSHARD,
        "TorchRec's planner costs 1.57 x as much on the production model",
        _production_ratio("neuroshard", "torchrec", 86.4 / 55.2),
    ),
    Claim(NEUROSHARD, "throughput gains 54.9 % over random", _production_gain),
    Claim(DREAMSHARD, "hundreds of tables in under a second", _solve_time("dreamshard", 1.0)),
    Claim(
        DREAMSHARD,
        "up to 19 % faster than the best heuristic",
        _over_heuristics("dreamshard", 0.19),
    ),
    Claim(
        DREAMSHARD,
        "transfers to other tables and ranks without training",
        _policies_transfer("dreamshard"),
    ),
    Claim(AUTOSHARD, "hundreds of tables in seconds", _solve_time("autoshard", 10.0)),
    Claim(
        AUTOSHARD,
        "transfers to other tables and ranks without training",
        _policies_transfer("autoshard"),
    ),
    Claim("this project", "neuroshard is first or tied on 95 % of the tasks", _first),
    Claim("this project", "random costs 1.5 x on 4 ranks", _measured_ratio("random", 4, 1.5)),
    Claim("this project", "random costs 1.7 x on 8 ranks", _measured_ratio("random", 8, 1.7)),
    Claim("this project", "torchrec costs 1.05 x on 4 ranks", _measured_ratio("torchrec", 4, 1.05)),
    Claim(
        "this project", "random costs 1.5 x on GPUs", _priced_ratio("random", PAPER_ON_GPUS, 1.5)
    ),
    Claim(
        "this project",
        "torchrec costs 1.05 x on GPUs",
        _priced_ratio("torchrec", PAPER_ON_GPUS, 1.05),
    ),
)
