"""Writes what a contest found: summary.md, tables for programs, and a picture."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dlrm_sharded.contest.entry import Entry, Measurement
from dlrm_sharded.contest.score import Score, bounds_ms, common_tasks, predicted_costs, scores
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file, replaced_file
from dlrm_sharded.files.provenance import commit, cpu_name, versions
from dlrm_sharded.files.text_table import UNKNOWN, Column, TextTable
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.runs.paired import PairedRatio

SUMMARY, PICTURE = "summary.md", "ratios.png"
MAX_SHOWN, MAX_FAILURES, MAX_REASON = 5, 20, 120
"""Number of cases without a plan that the terminal and the summary name, and characters of a
reason; by_plan has all."""

MAX_SHOWN_CASES = 40
"""Largest number of cases on topologies that the terminal shows; the summary shows all."""

MEASURED = (
    "Measured: the ranks' computation, one rank after another on this machine, in rounds of a "
    "drawn order; exchanges are predicted. A win or a loss is a task whose rounds tell the two "
    "apart with 95 % confidence."
)
EACH_TASK_REPEATED = (
    "Each task counts once for each topology and number of ranks, so these intervals are too "
    "narrow; those of one topology and number of ranks are in the summary."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a comparison is made and written.

    Args:
        margin: see `scores`.
        prices: where the prices come from, for the summary.
        file_format: of the tables, csv or parquet.
    """

    out: Path
    reference: str
    margin: float
    num_workers: int
    limit_s: float
    prices: str
    file_format: str


def write_report(
    entries: Sequence[Entry], measurements: Mapping[str, Measurement], setting: Setting
) -> list[str]:
    """Write all files, and return what the terminal shows.

    Raises:
        ConfigError: a file cannot be written.
    """
    # These load polars and matplotlib, which no case needs.
    from dlrm_sharded.contest.figures import plot_scores
    from dlrm_sharded.contest.tables import write_tables

    reference, out = setting.reference, setting.out
    found = scores(entries, reference, measurements, margin=setting.margin)
    table = score_table(found, reference)
    num_tasks = len({entry.task for entry in entries})
    lines = notes(found, entries, setting)
    texts = ["# Comparison of sharders", _heading(entries, setting)]
    shown = [f"comparison of {num_tasks} tasks:\n{table.text()}"]
    if any(entry.topology for entry in entries):
        cases = topology_table(entries)
        texts += ["## Topologies", cases.markdown(), "## Sharders"]
        if len(entries) <= MAX_SHOWN_CASES:
            shown.insert(0, f"plans on these topologies:\n{cases.text()}")
    result = verdict(found, reference)
    texts += [table.markdown(), f"Result: {result}.", _listed(lines)]
    kinds = list(dict.fromkeys(entry.kind for entry in entries))
    for kind in kinds if len(kinds) > 1 else []:
        of_kind = [entry for entry in entries if entry.kind == kind]
        tasks = {entry.task for entry in of_kind}
        measured = {task: one for task, one in measurements.items() if task in tasks}
        part = scores(of_kind, reference, measured, margin=setting.margin)
        texts += [f"## {kind}", score_table(part, reference).markdown()]
    if failed := failures(entries, most=MAX_FAILURES):
        texts += ["## Cases without a plan", _listed(failed)]
    try:
        replace_file(out / SUMMARY, ("\n\n".join(texts) + "\n").encode())
        files = write_tables(entries, measurements, reference, out, file_format=setting.file_format)
        with replaced_file(out / PICTURE) as file:
            plot_scores(found, reference).savefig(file, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot write the results in out = {out}: {error.strerror}") from error
    wrote = f"wrote {', '.join([SUMMARY, PICTURE, *files])} and plans: {out}"
    return [*shown, *lines, *failures(entries, most=MAX_SHOWN), wrote, f"result: {result}"]


def score_table(found: Sequence[Score], reference: str) -> TextTable:
    """Return a line for each sharder; figures that were not measured are predicted."""
    columns = ["sharder", "plans", f"predicted / {reference} [95 %]", "geometric mean"]
    columns += ["wins/ties/losses", "gap to bound, %: mean, worst (tasks)", "s: mean, worst"]
    if has_measured := any(score.measured for score in found):
        columns += [f"measured / {reference} [95 %]", "measured wins/ties/losses"]
    rows = []
    for score in found:
        gaps = [100 * gap for gap in score.gaps]
        row = [
            score.made_by,
            f"{score.num_solved}/{score.num_tasks}",
            _ratio_text(score.ratio),
            UNKNOWN if score.mean_ratio is None else f"{score.mean_ratio:.4f}",
            "/".join(map(str, score.tally)),
            f"{fmean(gaps):.1f}, {max(gaps):.1f} ({len(gaps)})" if gaps else UNKNOWN,
            f"{fmean(score.seconds):.2f}, {max(score.seconds):.2f}",
        ]
        if has_measured:
            row += [_ratio_text(score.measured), "/".join(map(str, score.measured_tally))]
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
        gap = 100 * (cost_ms / bound - 1) if cost_ms and bound else None
        task = entry.task.removesuffix(f"-{entry.topology}-{entry.world_size}")
        ranks = (entry.topology, entry.world_size, entry.num_hosts, entry.cost_model)
        plan = (_fit_text(entry), entry.made_by, cost_ms, bound, gap, entry.solve_s)
        rows.append((task, *ranks, *plan))
    return TextTable(columns, rows)


def notes(found: Sequence[Score], entries: Sequence[Entry], setting: Setting) -> list[str]:
    """Return what the figures of the table are."""
    costs = predicted_costs(entries)
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
        f"A tie with {setting.reference} is a difference of at most {100 * setting.margin:g} % of "
        "the predicted cost; a plan where the other one has none is a win.",
        "The gap is the distance from the best lower bound that any of them proves for a task.",
    ]
    if any(score.measured for score in found):
        texts.append(MEASURED)
    if len({(entry.topology, entry.world_size) for entry in entries if entry.topology}) > 1:
        texts.append(EACH_TASK_REPEATED)
    return texts


def verdict(found: Sequence[Score], reference: str) -> str:
    """Return the result in a sentence: the cheapest sharder, and how sure that is."""
    ranked = [(score.ratio, score) for score in found if score.ratio]
    if not ranked:
        return f"no task tells how any of them compares with {reference}"
    ratio, best = min(ranked, key=lambda one: one[0].ratio)
    if best.sharder == reference:
        return f"none of them is cheaper than {reference}"
    measured = f", measured {_ratio_text(best.measured)} x" if best.measured else ""
    doubt = "" if ratio.high < 1 else "; the tasks do not tell this apart from a tie"
    return f"{best.sharder} costs {_ratio_text(ratio)} x {reference}{measured}{doubt}"


def failures(entries: Sequence[Entry], *, most: int) -> list[str]:
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


def _heading(entries: Sequence[Entry], setting: Setting) -> str:
    """Say on what, where and by which prices the sharders are compared."""
    tables, sizes = ([entry.num_tables for entry in entries], [one.world_size for one in entries])
    digests = ", ".join(dict.fromkeys(entry.prices for entry in entries))
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return (
        f"{len({entry.task for entry in entries})} tasks of {_range(tables)} tables on "
        f"{_range(sizes)} ranks. Prices: {setting.prices}; digest {digests}. "
        f"{setting.num_workers} cases at once, {setting.limit_s:g} s each, on {cpu_name()} with "
        f"{os.cpu_count()} cores; load average at the end: {load}. Commit {commit()}; {software}."
    )


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least}" if least == most else f"{least} to {most}"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _fit_text(entry: Entry) -> str:
    """Say whether the tables fit the memory of all ranks, and how much is missing if not."""
    if entry.missing_bytes:
        return f"no: {entry.missing_bytes / GIB:,.1f} GiB are missing"
    return "yes" if entry.error is None else "yes, but no plan was found"


def _ratio_text(ratio: PairedRatio | None) -> str:
    """Write a ratio and its interval, which fewer than 6 pairs do not have."""
    if ratio is None:
        return UNKNOWN
    if ratio.low == 0:
        return f"{ratio.ratio:.4f}"
    return f"{ratio.ratio:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
