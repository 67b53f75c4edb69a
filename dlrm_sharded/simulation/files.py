"""Writes what both commands find: figures as JSON and CSV, plans, and pictures of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file, replaced_file, write_json
from dlrm_sharded.files.text_table import TextTable
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.simulation.choice import Choice
from dlrm_sharded.simulation.figures import plot_timeline
from dlrm_sharded.simulation.run import SimulatedRun
from dlrm_sharded.simulation.simulation_text import summary
from dlrm_sharded.simulation.store import folder_of
from dlrm_sharded.step.parts import PARTS
from dlrm_sharded.tracing.perfetto import timeline_spans, write_trace

TRACED_STEPS = 4
"""Steps of a trace."""


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
    with _writing(out):
        for run in runs:
            folder = folder_of(out, run.planned.sharder)
            per_host = run.task.topology.ranks_per_host
            write_trace(
                folder / "trace.json.gz",
                timeline_spans(run.timeline, num_steps=TRACED_STEPS),
                rank_names={
                    rank: f"rank {rank} (host {rank // per_host})" for rank in range(len(run.ranks))
                },
            )
            figure = plot_timeline(run, heading)
            with replaced_file(folder / "timeline.png") as picture:
                figure.savefig(picture, format="png", metadata={"Software": None})
        _write_csv(out / "ranks.csv", (row for run in runs for row in _rank_rows(run)))
        replace_file(out / "summary.md", summary(heading, notes, runs, failed).encode())
    fields = {
        "heading": heading,
        "notes": list(notes),
        "settings": dict(settings),
        "sharders": [run.to_json() for run in runs],
        "failed": [{"sharder": name, "message": text} for name, text in failed.items()],
    }
    write_json(out / "simulation.json", fields)


def write_advice(
    out: Path, choice: Choice, *, samples: float | None, texts: Mapping[str, str]
) -> None:
    """Write advice.json, advice.csv, and task.json and plan.json of the best candidate.

    Args:
        samples: samples of an epoch, to which hours and price belong; None if not known.
        texts: what the terminal shows, by name.

    Raises:
        ConfigError: a file cannot be written.
    """
    rows = [candidate.to_json(samples) for candidate in choice.asked]
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_csv(out / "advice.csv", rows)
    planned, task = choice.best.outcome.planned, choice.best.task
    assert task is not None
    write_json(out / "task.json", task.to_json())
    write_json(out / "plan.json", plan_json(planned.plan, planned.report))
    fields = {"objective": choice.objective, "samples": samples, **texts, "candidates": rows}
    write_json(out / "advice.json", fields)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn errors of the block into one message."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write the results in out = {out}: {error.strerror}") from error


def _write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows that all have the keys of the first one; None is an empty cell."""
    first, *others = rows
    table = TextTable([*first], [[row[key] for key in first] for row in (first, *others)])
    replace_file(path, table.csv().encode())


def _rank_rows(run: SimulatedRun) -> Iterator[dict[str, object]]:
    """Yield the rows of ranks.csv: times of the stages by themselves, and parts of the step."""
    by_rank = run.planned.plan.shards_by_rank()
    table_bytes, memory_bytes = run.table_bytes, run.memory_bytes
    for rank, times in enumerate(run.ranks):
        wait, stages = run.longest_wait(rank), run.cost.per_rank[rank]
        yield {
            "sharder": run.planned.sharder,
            "rank": rank,
            "host": rank // run.task.topology.ranks_per_host,
            "lookups": times.origin,
            "num_shards": len(by_rank[rank]),
            "num_folded": times.num_folded,
            "table_bytes": table_bytes[rank],
            "memory_bytes": memory_bytes[rank],
            "waits_longest_before": wait and wait.operation,
            "waits_longest_for": wait and wait.cause,
            **{f"{stage}_alone_ms": f"{stages.stage_ms(stage):.4f}" for stage in STAGES},
            **{f"{part}_ms": f"{run.step.breakdown.parts_ms[part][rank]:.4f}" for part in PARTS},
        }
