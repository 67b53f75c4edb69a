"""Writes the results of a simulation: a summary, figures by rank, plans, pictures and traces."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file, replaced_file, write_json
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.simulation.cluster import SimulatedRun
from dlrm_sharded.simulation.figures import first_steps, plot_timeline
from dlrm_sharded.simulation.text import summary
from dlrm_sharded.step.parts import PARTS
from dlrm_sharded.tracing.perfetto import timeline_spans, write_trace

TRACED_STEPS = 4
"""Steps of a trace."""

RANK_COLUMNS = (
    *("sharder", "rank", "host", "lookups", "num_shards", "num_folded", "table_bytes"),
    *("memory_bytes", "waits_longest_before", "waits_longest_for"),
    *(f"{stage}_alone_ms" for stage in STAGES),
    *(f"{part}_ms" for part in PARTS),
)
"""Columns of ranks.csv: times of the stages by themselves, and the parts of the step."""


def folder_of(out: Path, sharder: str) -> Path:
    """Return the folder of a sharder's files."""
    return out / re.sub(r"[^\w.=-]+", "_", sharder)


def write_simulation(
    out: Path,
    *,
    heading: str,
    notes: Sequence[str],
    settings: Mapping[str, Any],
    runs: Sequence[SimulatedRun],
    failed: Mapping[str, str],
) -> None:
    """Write all files of a simulation.

    Args:
        settings: what the simulation depends on, besides the sharders.
        failed: why sharders have no plan, by their names.

    Raises:
        ConfigError: a file cannot be written.
    """
    fields = {
        "heading": heading,
        "notes": list(notes),
        "settings": dict(settings),
        "sharders": [run.to_json() for run in runs],
        "failed": [{"sharder": name, "message": text} for name, text in failed.items()],
    }
    try:
        for run in runs:
            folder = folder_of(out, run.sharder)
            write_trace(
                folder / "trace.json.gz",
                timeline_spans(first_steps(run.timeline, TRACED_STEPS)),
                rank_names=_rank_names(run),
            )
            figure = plot_timeline(run, heading)
            with replaced_file(folder / "timeline.png") as picture:
                figure.savefig(picture, format="png", metadata={"Software": None})
        replace_file(out / "ranks.csv", _ranks_csv(runs).encode())
        replace_file(out / "summary.md", summary(heading, notes, runs, failed).encode())
    except OSError as error:
        raise ConfigError(f"cannot write the results in out = {out}: {error.strerror}") from error
    write_json(out / "simulation.json", fields)


def _rank_names(run: SimulatedRun) -> dict[int, str]:
    per_host = run.task.topology.ranks_per_host
    return {
        rank: f"rank {rank} (host {rank // per_host})" for rank in range(run.timeline.world_size)
    }


def _ranks_csv(runs: Sequence[SimulatedRun]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(RANK_COLUMNS)
    for run in runs:
        writer.writerows(_rows(run))
    return text.getvalue()


def _rows(run: SimulatedRun) -> list[list[object]]:
    topology = run.task.topology
    table_bytes, by_rank = run.plan.bytes_by_rank(topology), run.plan.shards_by_rank()
    rows: list[list[object]] = []
    for rank, times in enumerate(run.ranks):
        wait = run.longest_wait(rank)
        rows.append(
            [
                *(run.sharder, rank, rank // topology.ranks_per_host, times.origin),
                *(len(by_rank[rank]), times.num_folded, table_bytes[rank]),
                run.memory[rank].total,
                *(("", "") if wait is None else (wait.operation, wait.cause)),
                *(f"{run.cost.per_rank[rank].stage_ms(stage):.4f}" for stage in STAGES),
                *(f"{run.breakdown.parts_ms[part][rank]:.4f}" for part in PARTS),
            ]
        )
    return rows
