"""Writes advice for other tools: all candidates as JSON and CSV, and the plan of the best one."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_sharded.advice.candidates import Candidate, Failure
from dlrm_sharded.advice.choice import Choice
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file, write_json
from dlrm_sharded.step.parts import PARTS

FIGURES = (
    *("step_ms", "samples_per_s", "error", "embedding_ms", "hours", "price", "solve_s"),
    *(f"{part}_ms" for part in PARTS),
)
"""Keys of a row that candidates without an outcome have as null."""


def write_advice(
    folder: Path,
    candidates: Sequence[Candidate],
    choice: Choice,
    *,
    samples: float | None,
    texts: Mapping[str, Any],
) -> None:
    """Write advice.json, advice.csv, and task.json and plan.json of the best candidate.

    Args:
        samples: samples of an epoch, to which hours and price belong; None if not known.
        texts: what the terminal shows, by name.

    Raises:
        ConfigError: a file cannot be written.
    """
    rows = [row_of(candidate, samples) for candidate in candidates]
    best = choice.best
    assert best.task is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "advice.csv", _csv(rows))
    except OSError as error:
        raise ConfigError(f"cannot write to out={folder}: {error.strerror}") from error
    write_json(folder / "task.json", best.task.to_json())
    write_json(folder / "plan.json", best.outcome.plan)
    fields = {"objective": choice.objective, "samples": samples, **texts, "candidates": rows}
    write_json(folder / "advice.json", fields)


def row_of(candidate: Candidate, samples: float | None) -> dict[str, Any]:
    """Return a candidate as a flat object; unknown values are null."""
    case, result = candidate.case, candidate.result
    row: dict[str, Any] = {
        "hardware": case.machine.name,
        "gpu": None if case.machine.spec is None else case.machine.spec.key,
        "ranks": case.num_ranks,
        "sharder": case.sharder,
        "batch_size": candidate.batch_size,
        "fits": candidate.is_feasible,
        "reason": None,
        "missing_bytes": None,
        "cached_bytes": None,
    }
    row |= dict.fromkeys(FIGURES)
    if isinstance(result, Failure):
        return row | {"reason": result.reason, "missing_bytes": result.missing_bytes}
    row |= {
        "cached_bytes": result.cached_bytes,
        "step_ms": result.step_ms,
        "samples_per_s": candidate.samples_per_s,
        "error": result.error,
        "embedding_ms": result.embedding_ms,
        "solve_s": result.solve_s,
    }
    if samples is not None:
        row |= {"hours": candidate.hours(samples), "price": candidate.price(samples)}
    return row | {f"{part}_ms": ms for part, ms in result.parts_ms.items()}


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
