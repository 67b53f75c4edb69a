"""Writes what a contest found: summary.md, tables for programs, and a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.contest.entry import Entry
from dlrm_sharded.contest.measurement import Measurement
from dlrm_sharded.contest.score import predicted_costs, scores
from dlrm_sharded.contest.score_text import failures, notes, score_table, topology_table, verdict
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file, replaced_file
from dlrm_sharded.files.provenance import commit, cpu_name, versions

SUMMARY, PICTURE = "summary.md", "ratios.png"
MAX_SHOWN = 5
"""Number of cases without a plan that the terminal shows."""

MAX_SHOWN_CASES = 40
"""Largest number of cases on topologies that the terminal shows; the summary shows all."""

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
    lines = notes(found, reference, predicted_costs(entries), margin=setting.margin)
    texts = ["# Comparison of sharders", _heading(entries, setting)]
    shown = [f"comparison of {num_tasks} tasks:\n{table.text()}"]
    if any(entry.topology for entry in entries):
        if len({(entry.topology, entry.world_size) for entry in entries}) > 1:
            lines.append(EACH_TASK_REPEATED)
        cases = topology_table(entries)
        texts += ["## Topologies", cases.markdown(), "## Sharders"]
        if len(entries) <= MAX_SHOWN_CASES:
            shown.insert(0, f"plans on these topologies:\n{cases.text()}")
    result = verdict(found, reference)
    listed = "\n".join(f"- {line}" for line in lines)
    texts += [table.markdown(), f"Result: {result}.", listed]
    kinds = list(dict.fromkeys(entry.kind for entry in entries))
    for kind in kinds if len(kinds) > 1 else []:
        of_kind = [entry for entry in entries if entry.kind == kind]
        tasks = {entry.task for entry in of_kind}
        measured = {task: one for task, one in measurements.items() if task in tasks}
        part = scores(of_kind, reference, measured, margin=setting.margin)
        texts += [f"## {kind}", score_table(part, reference).markdown()]
    if failed := failures(entries):
        texts += ["## Cases without a plan", "\n".join(f"- {line}" for line in failed)]
    try:
        replace_file(out / SUMMARY, ("\n\n".join(texts) + "\n").encode())
        files = write_tables(entries, measurements, reference, out, file_format=setting.file_format)
        with replaced_file(out / PICTURE) as file:
            plot_scores(found, reference).savefig(file, format="png", metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot write the results in out = {out}: {error.strerror}") from error
    wrote = f"wrote {', '.join([SUMMARY, PICTURE, *files])} and plans: {out}"
    shown += [*lines, *failures(entries, most=MAX_SHOWN)]
    return [*shown, wrote, f"result: {result}"]


def _heading(entries: Sequence[Entry], setting: Setting) -> str:
    """Say on what, where and by which prices the sharders are compared."""
    sizes = sorted({entry.world_size for entry in entries})
    tables = sorted({entry.num_tables for entry in entries})
    tasks = len({entry.task for entry in entries})
    digests = ", ".join(dict.fromkeys(entry.prices for entry in entries))
    software = ", ".join(f"{name} {version}" for name, version in versions().items())
    load = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return (
        f"{tasks} tasks of {_range(tables)} tables on {_range(sizes)} ranks. Prices: "
        f"{setting.prices}; digest {digests}. {setting.num_workers} cases at once, "
        f"{setting.limit_s:g} s each, on {cpu_name()} with {os.cpu_count()} cores; load average at "
        f"the end: {load}. Commit {commit()}; {software}."
    )


def _range(sizes: Sequence[int]) -> str:
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
