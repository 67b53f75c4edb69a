"""Rows of the trace of recorded steps: parts, exchanges, operators and kernels of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dlrm_sharded.step.parts import PART_LABELS, WAITING
from dlrm_sharded.tracing.perfetto import Span
from dlrm_sharded.tracing.recorded import RecordedRank, RecordedSteps
from dlrm_sharded.tracing.regions import Collective

STEPS_ROW, PARTS_ROW, EXCHANGES_ROW = "steps", "parts", "exchanges"


def recorded_spans(
    steps: RecordedSteps, ranks: Sequence[RecordedRank], *, first_step: int
) -> list[Span]:
    """Return the spans of all ranks.

    Args:
        first_step: number of the first recorded step, from 1 on.
    """
    spans: list[Span] = []
    for number, rank in enumerate(ranks):
        for step, (begin_ms, end_ms) in enumerate(rank.steps):
            name = f"step {first_step + step}"
            spans.append(Span(number, STEPS_ROW, name, "step", begin_ms, end_ms))
        for piece in steps.pieces[number]:
            name = piece.operator if piece.part == WAITING else PART_LABELS[piece.part]
            spans.append(Span(number, PARTS_ROW, name, piece.part, piece.begin_ms, piece.end_ms))
        spans += _exchange_spans(number, _in_steps(rank))
        spans += (replace(span, rank=number) for span in rank.details)
    return spans


def rows(spans: Iterable[Span]) -> list[str]:
    """Return all rows, those of steps, parts and exchanges first."""
    found = dict.fromkeys(span.stream for span in spans)
    return sorted(found, key=lambda row: (row != STEPS_ROW, row != PARTS_ROW, row))


def _in_steps(rank: RecordedRank) -> Iterator[Collective]:
    since, until = rank.steps[0][0], rank.steps[-1][1]
    return (each for each in rank.collectives if since <= each.arrival_ms <= until)


def _exchange_spans(rank: int, collectives: Iterable[Collective]) -> Iterator[Span]:
    """Yield exchanges, each in the first row that is free, as they can be under way together."""
    free_since: list[float] = []
    for each in collectives:
        row = next((i for i, free in enumerate(free_since) if free <= each.arrival_ms), None)
        if row is None:
            row = len(free_since)
            free_since.append(0.0)
        free_since[row] = each.end_ms
        name = PART_LABELS.get(each.part, each.part)
        stream = EXCHANGES_ROW if row == 0 else f"{EXCHANGES_ROW} {row + 1}"
        yield Span(rank, stream, name, each.part, each.arrival_ms, each.end_ms)
