"""Writes what a contest found: summary.md, tables for programs, and a plot."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean

import polars as pl
from matplotlib.figure import Figure

from dlrm_sharded.contest.cases import Entry, Measurement, Setting
from dlrm_sharded.contest.scores import Score, by_plan, in_common, scores, write_tables
from dlrm_sharded.files.json_files import replace_file, replaced_file
from dlrm_sharded.files.provenance import commit, cpu_name, versions
from dlrm_sharded.files.text_table import Column, TextTable, listed, quantity, span
from dlrm_sharded.runs.comparison_figures import plot_ratios

SUMMARY, PLOT = "summary.md", "ratios.png"
MAX_FAILURES, MAX_REASON = 10, 120
"""Most cases without a plan that are named, and most characters of a reason; by_plan has all."""

TOPOLOGY_COLUMNS = (
    *("task", "topology", "world_size", "num_hosts", "cost_model", "missing_gib"),
    *("made_by", "cost_ms", "bound_ms", "gap", "solve_s"),
)
"""Columns of `by_plan` that say whether tables fit a topology and what a plan costs there."""

ABOUT_MEASURED = (
    "Measured: the ranks' computation, one rank after another on this machine, in rounds of a "
    "drawn order; exchanges are predicted. A win or a loss is a task whose rounds distinguish the "
    "two with 95 % confidence."
)
EACH_TASK_REPEATED = (
    "Each task counts once for each topology and number of ranks, so these intervals are too "
    "narrow; those of one topology and number of ranks are in the summary."
)


def write_report(
    entries: Sequence[Entry], measurements: Mapping[str, Measurement], setting: Setting
) -> list[str]:
    """Write all files, and return what the terminal shows.

    Raises:
        OSError: a file cannot be written.
    """
    plans = by_plan(entries, measurements, setting.reference)
    found = scores(plans, margin=setting.margin)
    table, result = score_table(found, setting.reference), verdict(found, setting.reference)
    lines, failed = notes(found, plans, setting), failures(plans)
    texts = ["# Comparison of sharders", _heading(plans, setting)]
    shown = [f"comparison of {quantity(plans['task'].n_unique(), 'task')}:\n{table.text()}"]
    if any(plans["topology"]):
        columns = [Column(name, ",.4g") for name in TOPOLOGY_COLUMNS]
        cases = TextTable(columns, plans.select(TOPOLOGY_COLUMNS).rows())
        texts += ["## Topologies", cases.markdown(), "## Sharders"]
        shown.insert(0, f"plans on these topologies:\n{cases.text()}")
    texts += [table.markdown(), f"Result: {result}.", listed(lines)]
    if plans["kind"].n_unique() > 1:
        for (kind,), of_kind in plans.group_by("kind", maintain_order=True):
            part = scores(of_kind, margin=setting.margin)
            texts += [f"## {kind}", score_table(part, setting.reference).markdown()]
    if failed:
        texts += ["## Cases without a plan", listed(failed)]
    replace_file(setting.out / SUMMARY, ("\n\n".join(texts) + "\n").encode())
    files = write_tables(plans, entries, measurements, setting)
    with replaced_file(setting.out / PLOT) as file:
        plot = plot_scores(found, setting.reference)
        plot.set_figwidth(7.0)  # names of sharders include their settings
        plot.savefig(file, format="png", metadata={"Software": None})
    wrote = f"wrote {', '.join([SUMMARY, PLOT, *files])} and plans: {setting.out}"
    return [*shown, *lines, *failed, wrote, f"result: {result}"]


def plot_scores(found: Sequence[Score], reference: str) -> Figure:
    """Draw the ratios of all sharders, the cheapest one on top."""
    ranked = sorted(found, key=lambda one: getattr(one.ratios["predicted"], "ratio", math.inf))
    names = [f"{score} ({score.num_solved}/{score.plans.height})" for score in ranked]
    series = {kind: [score.ratios[kind] for score in ranked] for kind in found[0].ratios}
    label = f"{' and '.join(series)} cost / {reference}'s, 95 % intervals (plans / tasks)"
    return plot_ratios(names, series, label)


def score_table(found: Sequence[Score], reference: str) -> TextTable:
    """Return a line for each sharder; gaps are of predicted costs."""
    columns = ["sharder", "plans"]
    for kind in found[0].ratios:
        columns += [f"{kind} / {reference} [95 %]", f"{kind} wins/ties/losses"]
    columns += ["gap to bound, %: mean, worst (tasks)", "s: mean, worst"]
    rows = []
    for score in found:
        row: list[object] = [score, f"{score.num_solved}/{score.plans.height}"]
        is_reference = score.plans["sharder"][0] == reference
        for kind, ratio in score.ratios.items():
            tally = "/".join(map(str, score.tallies[kind]))
            row += ["reference", None] if is_reference else [ratio and ratio.text(4), tally]
        gaps = [100 * gap for gap in score.plans["gap"].drop_nulls()]
        seconds = score.plans["solve_s"].to_list()
        row.append(f"{fmean(gaps):.1f}, {max(gaps):.1f} ({len(gaps)})" if gaps else None)
        rows.append([*row, f"{fmean(seconds):.2f}, {max(seconds):.2f}"])
    return TextTable(columns, rows)


def notes(found: Sequence[Score], plans: pl.DataFrame, setting: Setting) -> list[str]:
    """Return sentences that explain the figures of the table."""
    common, num_tasks = in_common(plans)["task"].n_unique(), plans["task"].n_unique()
    without = [score.plans["sharder"][0] for score in found if not score.num_solved]
    but = f" but {', '.join(without)}, without any plan," if without else ""
    texts = [
        f"Ratios are costs divided by those of {setting.reference} (above 1 costs more), on the "
        f"tasks that all of them{but} solve ({common} of {num_tasks}): the median of the "
        "pairwise means (Hodges and Lehmann) with Wilcoxon's 95 % interval, which needs 6 tasks.",
        "A ratio is a tie if its interval contains 1, and a task if the predicted costs differ by "
        f"at most {100 * setting.margin:g} %; a plan where the other one has none is a win.",
        "The gap is the distance from the best lower bound that any of them proves for a task.",
    ]
    if "measured" in found[0].ratios:
        texts.append(ABOUT_MEASURED)
    if any(plans["topology"]) and plans.n_unique(["topology", "world_size"]) > 1:
        texts.append(EACH_TASK_REPEATED)
    return texts


def verdict(found: Sequence[Score], reference: str) -> str:
    """Return the result in a sentence: the cheapest sharder, and how sure that is."""
    ranked = [(ratio, score) for score in found if (ratio := score.ratios["predicted"])]
    if not ranked:
        return f"no task shows how any of them compares with {reference}"
    predicted, best = min(ranked, key=lambda one: one[0].ratio)
    if predicted.ratio >= 1:
        return f"none of them is cheaper than {reference}"
    measured = f", measured {ratio.text(4)}" if (ratio := best.ratios.get("measured")) else ""
    return f"the predicted cost of {best} over {reference}'s is {predicted.text(4)}{measured}"


def failures(plans: pl.DataFrame) -> list[str]:
    """Return a line for each of the first cases without a plan, with the reason."""
    failed = plans.drop_nulls("error").select("task", "sharder", "error").rows()
    lines = [
        f"no plan: {task}, {sharder}: {textwrap.shorten(error, MAX_REASON, placeholder=' ...')}"
        for task, sharder, error in failed
    ]
    more = len(lines) - MAX_FAILURES
    return [*lines[:MAX_FAILURES], *([f"and {more} more, in by_plan"] if more > 0 else [])]


def _heading(plans: pl.DataFrame, setting: Setting) -> str:
    """Say on which tasks, with which costs and on which machine the sharders are compared."""
    tables, ranks = (span(plans[name]) for name in ("num_tables", "world_size"))
    used = plans.select("cost_model", "prices").unique(maintain_order=True)
    cost_models = "; ".join(f"{model}, digest {digest}" for model, digest in used.rows())
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return (
        f"{quantity(plans['task'].n_unique(), 'task')}; tables: {tables}; ranks: {ranks}. "
        f"Cost model: {cost_models}. "
        f"{quantity(setting.num_workers, 'case')} at once, {setting.limit_s:g} s each, on "
        f"{cpu_name()} with {quantity(os.cpu_count() or 1, 'core')}; load average at the end: "
        f"{load}. Commit {commit()}; {software}."
    )
