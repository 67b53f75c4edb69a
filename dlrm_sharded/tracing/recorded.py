"""Breaks the recorded steps of all ranks down into parts, waits and what caused them.

A rank that has come to an exchange waits until the last rank has come, too. From then on, the
exchange is a transfer. Both count only where the rank does nothing else meanwhile.

Letters: N steps, W ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from dlrm_sharded.step.breakdown import Breakdown, sum_waits
from dlrm_sharded.step.parts import EXCHANGES, OTHER, PARTS, WAITING
from dlrm_sharded.step.timeline import Times
from dlrm_sharded.tracing.perfetto import Span
from dlrm_sharded.tracing.regions import Collective, Segment

S = TypeVar("S", Segment, Span)

BETWEEN_STEPS = "between_steps"
"""Name of the cause if a rank begins a step after the others."""


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """Recorded steps of one rank, in ms of one clock.

    Args:
        steps: begin and end of each step.
        segments: what the rank did at each moment, in order; gaps are `OTHER`.
        collectives: in the order of their arrival.
        operators_ms: time of (part, operator, layer) in all steps together.
        details: what the trace shows besides, such as operators.
    """

    steps: tuple[tuple[float, float], ...]
    segments: tuple[Segment, ...]
    collectives: tuple[Collective, ...]
    operators_ms: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    details: tuple[Span, ...] = ()

    def moved(self, by_ms: float) -> RecordedRank:
        """Return the record by a clock that shows `by_ms` more."""

        def move(spans: Iterable[S]) -> tuple[S, ...]:
            return tuple(
                replace(span, begin_ms=span.begin_ms + by_ms, end_ms=span.end_ms + by_ms)
                for span in spans
            )

        return replace(
            self,
            steps=tuple((begin + by_ms, end + by_ms) for begin, end in self.steps),
            segments=move(self.segments),
            details=move(self.details),
            collectives=tuple(
                Collective(each.part, each.arrival_ms + by_ms, each.end_ms + by_ms)
                for each in self.collectives
            ),
        )


@dataclass(frozen=True, slots=True)
class Lateness:
    """The work that took a rank longer than the others, which wait for it.

    Args:
        exchange: the exchange to which it came last.
        part: one of `PARTS`, or `BETWEEN_STEPS`.
        excess_ms: how much longer than the mean of the other ranks, per step.
    """

    rank: int
    exchange: str
    part: str
    excess_ms: float


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Recorded steps of all ranks, and where their time goes.

    Args:
        breakdown: parts of the mean step on every rank, and the waits.
        median_ms: [W] for each part; unlike the mean, it leaves out what happens in a few steps.
        transfer_ms: [W], median time of each exchange from the last rank's arrival on, exposed
            or not.
        lateness: what each rank that others wait for is late with, the longest first.
        pieces: what every rank did at each moment, with its waits.
    """

    breakdown: Breakdown
    median_ms: Mapping[str, Times]
    transfer_ms: Mapping[str, Times]
    lateness: tuple[Lateness, ...]
    pieces: tuple[tuple[Segment, ...], ...]

    def late_with(self, rank: int, exchange: str) -> Lateness | None:
        """Return what a rank is most late with at an exchange; None if that is not known."""
        of_rank = (late for late in self.lateness if late.rank == rank)
        return next((late for late in of_rank if late.exchange == exchange), None)


def operator_times(
    segments: Iterable[Segment], steps: Sequence[tuple[float, float]]
) -> dict[tuple[str, str, str], float]:
    """Return the time of each (part, operator, layer) within the steps, in ms."""
    found: dict[tuple[str, str, str], float] = {}
    for segment in _within_steps(segments, steps):
        key = (segment.part, segment.operator, segment.module)
        found[key] = found.get(key, 0.0) + segment.end_ms - segment.begin_ms
    return found


def _within_steps(
    segments: Iterable[Segment], steps: Sequence[tuple[float, float]]
) -> list[Segment]:
    """Return the parts of segments that lie in a step."""
    begins = [begin for begin, _ in steps]
    inside = []
    for segment in segments:
        first = max(0, bisect_right(begins, segment.begin_ms) - 1)
        for begin, end in steps[first:]:
            if begin >= segment.end_ms:
                break
            if end > segment.begin_ms:
                inside.append(
                    replace(
                        segment,
                        begin_ms=max(begin, segment.begin_ms),
                        end_ms=min(end, segment.end_ms),
                    )
                )
    return inside


def break_down(ranks: Sequence[RecordedRank]) -> RecordedSteps:
    """Break the steps of all ranks down; every rank has recorded as many.

    The collectives of a part have one order on all ranks, so the n-th ones belong together.
    """
    groups = _matched(ranks)
    pieces, waited = _with_waits(ranks, groups)
    parts = _parts_of_steps(ranks, pieces)
    num_steps = len(ranks[0].steps)
    waits: dict[str, list[tuple[int, Times]]] = {}
    for group, waited_ms in zip(groups, waited, strict=True):
        if waited_ms.any():
            waits.setdefault(group[0].part, []).append((_last(group), waited_ms))
    found = Breakdown(
        {part: times.mean(axis=0) for part, times in parts.items()}, sum_waits(waits, num_steps)
    )
    return RecordedSteps(
        breakdown=found,
        median_ms={part: np.median(times, axis=0) for part, times in parts.items()},
        transfer_ms=_transfers(ranks, groups, pieces),
        lateness=_lateness(ranks, groups, waited, pieces),
        pieces=tuple(tuple(of_rank) for of_rank in pieces),
    )


def _matched(ranks: Sequence[RecordedRank]) -> list[tuple[Collective, ...]]:
    """Return each collective on all ranks, [W] each, in the order of the last arrivals."""
    groups: list[tuple[Collective, ...]] = []
    for part in EXCHANGES:
        by_rank = [[each for each in rank.collectives if each.part == part] for rank in ranks]
        groups += zip(*by_rank, strict=False)
    return sorted(groups, key=lambda group: max(each.arrival_ms for each in group))


def _last(group: Sequence[Collective]) -> int:
    """Return the rank that came last."""
    return max(range(len(group)), key=lambda rank: group[rank].arrival_ms)


def _with_waits(
    ranks: Sequence[RecordedRank], groups: Sequence[Sequence[Collective]]
) -> tuple[list[list[Segment]], list[Times]]:
    """Return the segments of every rank with its waits, and how long each group lets ranks wait.

    Both are within steps.
    """
    waited = [np.zeros(len(ranks)) for _ in groups]
    pieces = []
    for number, rank in enumerate(ranks):
        inside = _within_steps(_filled(rank), rank.steps)
        windows: dict[str, list[tuple[float, float, int]]] = {part: [] for part in EXCHANGES}
        for index, group in enumerate(groups):
            until = max(each.arrival_ms for each in group)
            of_part = windows[group[number].part]
            since = max(group[number].arrival_ms, of_part[-1][1] if of_part else -np.inf)
            if until > since:
                of_part.append((since, until, index))
        done: list[Segment] = []
        for segment in inside:
            for piece, place in _split(segment, windows.get(segment.part, [])):
                if place is not None:
                    piece = replace(piece, operator=f"wait for rank {_last(groups[place])}")
                    waited[place][number] += piece.end_ms - piece.begin_ms
                done.append(piece)
        pieces.append(done)
    return pieces, waited


def _filled(rank: RecordedRank) -> list[Segment]:
    """Return the segments of a rank, with `OTHER` in the gaps between them within steps."""
    filled: list[Segment] = []
    bounds = [(begin, end) for begin, end in rank.steps]
    clock = bounds[0][0]
    for segment in [*rank.segments, Segment(OTHER, bounds[-1][1], bounds[-1][1])]:
        if segment.begin_ms > clock:
            filled.append(Segment(OTHER, clock, segment.begin_ms))
        filled.append(segment)
        clock = max(clock, segment.end_ms)
    return filled


def _split(
    segment: Segment, windows: Sequence[tuple[float, float, int]]
) -> Iterable[tuple[Segment, int | None]]:
    """Divide a segment into waits, each with its place among the collectives, and the rest."""
    clock = segment.begin_ms
    first = bisect_right(windows, segment.begin_ms, key=lambda window: window[1])
    for since, until, place in windows[first:]:
        begin, end = max(clock, since), min(segment.end_ms, until)
        if since >= segment.end_ms:
            break
        if begin > clock:
            yield replace(segment, begin_ms=clock, end_ms=begin), None
        yield replace(segment, part=WAITING, begin_ms=begin, end_ms=end), place
        clock = end
    if segment.end_ms > clock:
        yield replace(segment, begin_ms=clock), None


def _parts_of_steps(
    ranks: Sequence[RecordedRank], pieces: Sequence[Sequence[Segment]]
) -> dict[str, Times]:
    """Return [N, W] for each of `PARTS`."""
    shape = (len(ranks[0].steps), len(ranks))
    parts = {part: np.zeros(shape) for part in PARTS}
    for number, (rank, of_rank) in enumerate(zip(ranks, pieces, strict=True)):
        begins = [begin for begin, _ in rank.steps]
        for piece in of_rank:
            step = bisect_right(begins, piece.begin_ms) - 1
            parts[piece.part][step, number] += piece.end_ms - piece.begin_ms
    return parts


def _transfers(
    ranks: Sequence[RecordedRank],
    groups: Sequence[Sequence[Collective]],
    pieces: Sequence[Sequence[Segment]],
) -> dict[str, Times]:
    """Return the median time [W] of each exchange after the last arrivals."""
    found = {}
    for part in EXCHANGES:
        by_rank = []
        for number, rank in enumerate(ranks):
            spans = [(p.begin_ms, p.end_ms) for p in pieces[number] if p.part == part]
            for group in groups:
                if group[number].part == part:
                    last_ms = max(each.arrival_ms for each in group)
                    spans.append((last_ms, max(last_ms, group[number].end_ms)))
            by_rank.append(np.median([_union_ms(spans, *step) for step in rank.steps]))
        found[part] = np.array(by_rank)
    return found


def _union_ms(spans: Iterable[tuple[float, float]], since: float, until: float) -> float:
    """Return the length of the union of spans within a time."""
    total, clock = 0.0, since
    for begin, end in sorted(spans):
        begin, end = max(begin, clock), min(end, until)
        if end > begin:
            total += end - begin
            clock = end
    return total


def _lateness(
    ranks: Sequence[RecordedRank],
    groups: Sequence[Sequence[Collective]],
    waited: Sequence[Times],
    pieces: Sequence[Sequence[Segment]],
) -> tuple[Lateness, ...]:
    """Compare what ranks did before each exchange since the one before, in which they met."""
    excess_ms: dict[tuple[int, str, str], float] = {}
    begins = [[piece.begin_ms for piece in of_rank] for of_rank in pieces]
    for place, group in enumerate(groups):
        if not waited[place].any():
            continue
        since = _met_before(groups[:place], group, ranks)
        last = _last(group)
        did = [
            _parts_between(pieces[r], begins[r], since[r], group[r].arrival_ms)
            for r in range(len(ranks))
        ]
        for part in set().union(*did) - {WAITING}:
            others = [did[r].get(part, 0.0) for r in range(len(ranks)) if r != last]
            more_ms = did[last].get(part, 0.0) - float(np.mean(others))
            key = (last, group[0].part, part)
            excess_ms[key] = excess_ms.get(key, 0.0) + max(0.0, more_ms)
    num_steps = len(ranks[0].steps)
    found = [Lateness(*key, ms / num_steps) for key, ms in excess_ms.items() if ms > 0]
    return tuple(sorted(found, key=lambda late: -late.excess_ms))


def _met_before(
    earlier: Sequence[Sequence[Collective]],
    group: Sequence[Collective],
    ranks: Sequence[RecordedRank],
) -> list[float]:
    """Return when every rank left the last exchange that all ranks left before they came to one."""
    for other in reversed(earlier):
        if all(a.end_ms <= b.arrival_ms for a, b in zip(other, group, strict=True)):
            return [each.end_ms for each in other]
    return [min(rank.steps[0][0] for rank in ranks)] * len(ranks)


def _parts_between(
    pieces: Sequence[Segment], begins: Sequence[float], since: float, until: float
) -> dict[str, float]:
    """Return the time of each part between two moments; what is in no step is between steps."""
    found: dict[str, float] = {}
    for piece in pieces[max(0, bisect_right(begins, since) - 1) :]:
        if piece.begin_ms >= until:
            break
        ms = min(until, piece.end_ms) - max(since, piece.begin_ms)
        if ms > 0:
            found[piece.part] = found.get(piece.part, 0.0) + ms
    found[BETWEEN_STEPS] = max(0.0, until - since - sum(found.values()))
    return found
