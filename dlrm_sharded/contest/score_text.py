"""The scores of a contest as tables and sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import fmean

from dlrm_sharded.contest.entry import Entry
from dlrm_sharded.contest.score import Costs, Score, Tally, bounds_ms, common_tasks
from dlrm_sharded.files.text_table import UNKNOWN, Column, TextTable
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.runs.paired import PairedRatio

MAX_FAILURES, MAX_REASON = 20, 120
"""Number of cases without a plan that a text names, and characters of a reason; by_plan has all."""


def score_table(found: Sequence[Score], reference: str) -> TextTable:
    """Return a line for each sharder; figures that were not measured are predicted."""
    has_measured = any(score.measured for score in found)
    columns = ["sharder", "plans", f"predicted / {reference} [95 %]", "geometric mean"]
    columns += ["wins/ties/losses", "gap to bound, %: mean, worst (tasks)", "s: mean, worst"]
    if has_measured:
        columns += [f"measured / {reference} [95 %]", "measured wins/ties/losses"]
    rows = []
    for score in found:
        gaps = [100 * gap for gap in score.gaps]
        row: list[object] = [
            score.made_by,
            f"{score.num_solved}/{score.num_tasks}",
            ratio_text(score.ratio),
            UNKNOWN if score.mean_ratio is None else f"{score.mean_ratio:.4f}",
            tally_text(score.tally),
            f"{fmean(gaps):.1f}, {max(gaps):.1f} ({len(gaps)})" if gaps else UNKNOWN,
            f"{fmean(score.seconds):.2f}, {max(score.seconds):.2f}",
        ]
        if has_measured:
            row.append(ratio_text(score.measured))
            row.append(tally_text(score.measured_tally))
        rows.append(row)
    return TextTable(columns, rows)


def topology_table(entries: Sequence[Entry]) -> TextTable:
    """Return a line for each case: whether the tables fit the ranks, and what the plan costs."""
    bounds = bounds_ms(entries)
    columns: list[Column | str] = ["task", "topology", Column("ranks", align=">")]
    columns += [Column("hosts", align=">"), "cost model", "tables fit", "sharder"]
    columns += [Column(title, ",.3f", ">") for title in ("cost, ms", "bound, ms")]
    columns += [Column("gap, %", ".1f", ">"), Column("s to plan", ".2f", ">")]
    rows = []
    for entry in entries:
        cost_ms, bound = entry.cost and entry.cost.cost_ms, bounds.get(entry.task)
        task = entry.task.removesuffix(f"-{entry.topology}-{entry.world_size}")
        rows.append(
            [
                *(task, entry.topology, entry.world_size, entry.num_hosts, entry.cost_model),
                *(fit_text(entry), entry.made_by, cost_ms, bound),
                100 * (cost_ms / bound - 1) if cost_ms and bound else None,
                entry.solve_s,
            ]
        )
    return TextTable(columns, rows)


def fit_text(entry: Entry) -> str:
    """Say whether the tables fit the memory of all ranks, and how much is missing if not."""
    if entry.missing_bytes:
        return f"no: {entry.missing_bytes / GIB:,.1f} GiB are missing"
    return "yes" if entry.error is None else "yes, but no plan was found"


def ratio_text(ratio: PairedRatio | None) -> str:
    """Write a ratio and its interval, which fewer than 6 pairs do not have."""
    if ratio is None:
        return UNKNOWN
    if ratio.low == 0:
        return f"{ratio.ratio:.4f}"
    return f"{ratio.ratio:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"


def tally_text(tally: Tally) -> str:
    """Write the numbers of wins, ties and losses."""
    return "/".join(map(str, tally))


def notes(found: Sequence[Score], reference: str, costs: Costs, *, margin: float) -> list[str]:
    """Return what the figures of the table are.

    Args:
        costs: predicted costs, of which the ratios are.
    """
    common, num_tasks = len(common_tasks(costs)), max(score.num_tasks for score in found)
    without = [score.sharder for score in found if not score.num_solved]
    whose = f"all of them but {', '.join(without)}, without any plan," if without else "all of them"
    fewest = min(costs, key=lambda sharder: len(costs[sharder]) or num_tasks)
    rest = len(common_tasks({name: of for name, of in costs.items() if name != fewest}))
    spoils = f" Without {fewest}, they would be of {rest}." if rest > common else ""
    texts = [
        f"Ratios are of the {common} of {num_tasks} tasks that {whose} solve: the median of the "
        "pairwise means (Hodges and Lehmann) with Wilcoxon's 95 % interval, which needs 6 tasks, "
        f"and the geometric mean.{spoils}",
        f"A tie with {reference} is a difference of at most {100 * margin:g} % of the predicted "
        "cost; a plan where the other one has none is a win.",
        "The gap is the distance from the best lower bound that any of them proves for a task.",
    ]
    if any(score.measured for score in found):
        texts.append(
            "Measured: the ranks' computation, one rank after another on this machine, in rounds "
            "of a drawn order; exchanges are predicted. A win or a loss is a task whose rounds "
            "tell the two apart with 95 % confidence."
        )
    return texts


def verdict(found: Sequence[Score], reference: str) -> str:
    """Return the result in a sentence: the cheapest sharder, and how sure that is."""
    ranked = [(score.ratio.ratio, score) for score in found if score.ratio]
    if not ranked:
        return f"no task tells how any of them compares with {reference}"
    _, best = min(ranked, key=lambda one: one[0])
    if best.sharder == reference:
        return f"none of them is cheaper than {reference}"
    measured = f", measured {ratio_text(best.measured)} x" if best.measured else ""
    is_sure = best.ratio is not None and best.ratio.high < 1
    doubt = "" if is_sure else "; the tasks do not tell this apart from a tie"
    return f"{best.sharder} costs {ratio_text(best.ratio)} x {reference}{measured}{doubt}"


def failures(entries: Sequence[Entry], *, most: int = MAX_FAILURES) -> list[str]:
    """Return a line for each task and reason why there is no plan, the first `most` of them."""
    sharders: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        if entry.error is not None:
            error = textwrap.shorten(entry.error, MAX_REASON, placeholder=" ...")
            sharders.setdefault((entry.task, error), []).append(entry.sharder)
    lines = [
        f"no plan: {task}, {', '.join(names)}: {error}" for (task, error), names in sharders.items()
    ]
    more = len(lines) - most
    return lines[:most] + ([f"and {more} more, in by_plan"] if more > 0 else [])
