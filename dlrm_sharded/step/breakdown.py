"""Breaks a step down: where its time goes on every rank, and which rank the others wait for.

Simulated timelines and recorded traces are broken down into the same parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dlrm_sharded.step.parts import HOST_WAIT, OTHER, PARTS, WAITING
from dlrm_sharded.step.timeline import COMPUTE, Operation, Timeline, Times


@dataclass(frozen=True, slots=True)
class Wait:
    """Waiting for the rank that comes last to an exchange, per step.

    Args:
        operation: the exchange.
        cause: the rank that came last most often, weighted by how long the others waited.
        waiting_ms: [W], mean time that each rank waited.
        caused_ms: the part of the mean wait of a rank that is due to `cause`.
    """

    operation: str
    cause: int
    waiting_ms: Times
    caused_ms: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Parts of a step on every rank, in ms.

    Args:
        parts_ms: [W] for each of `PARTS`; they sum to the step on every rank. Of an exchange, that
            is the time in which the rank does nothing else.
        hidden_ms: [W] for each of `EXCHANGES` that a simulation ran, the time of the exchange in
            which the rank computes.
        waits: exchanges that ranks waited for, the longest mean wait first.
    """

    parts_ms: Mapping[str, Times]
    waits: tuple[Wait, ...] = ()
    hidden_ms: Mapping[str, Times] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Mean time of a step."""
        return float(sum(times.mean() for times in self.parts_ms.values()))

    def scaled(self, factor: float) -> Breakdown:
        """Return a step that takes `factor` times as long in all its parts."""
        waits = tuple(
            Wait(w.operation, w.cause, factor * w.waiting_ms, factor * w.caused_ms)
            for w in self.waits
        )
        parts, hidden = (
            {part: factor * ms for part, ms in times.items()}
            for times in (self.parts_ms, self.hidden_ms)
        )
        return Breakdown(parts, waits, hidden)

    def launched_in(self, host_ms: float) -> Breakdown:
        """Return the step of devices that wait for hosts which take so long to launch one."""
        wait_ms = np.full_like(self.parts_ms[HOST_WAIT], max(0.0, host_ms - self.step_ms))
        return dataclasses.replace(self, parts_ms={**self.parts_ms, HOST_WAIT: wait_ms})

    def waiting_longer(self, more_ms: float) -> Breakdown:
        """Return a step in which all ranks wait so much longer for the slowest one."""
        waiting = self.parts_ms[WAITING] + more_ms
        return dataclasses.replace(self, parts_ms={**self.parts_ms, WAITING: waiting})

    def mean_ms(self, part: str) -> float:
        """Return the time of a part, averaged over all ranks."""
        return float(self.parts_ms[part].mean())

    @property
    def mean_parts_ms(self) -> dict[str, float]:
        """Time of every part, averaged over all ranks; they sum to the step."""
        return {part: self.mean_ms(part) for part in PARTS}

    @property
    def mean_hidden_ms(self) -> dict[str, float]:
        """Time of every exchange that is hidden behind computation, averaged over all ranks."""
        return {part: float(times.mean()) for part, times in self.hidden_ms.items()}


def breakdown(timeline: Timeline) -> Breakdown:
    """Break a timeline's steps down, without the first one, which begins with nothing under way.

    A gap between two computations is waiting until the last rank has come to the exchange that
    the second one needs, and exposed exchange from then on.
    """
    ledger = _Ledger(timeline)
    computations = [op for op in timeline.operations if op.stream == COMPUTE]
    first = min(1, timeline.num_steps - 1)
    free_since = np.zeros(timeline.world_size)
    if first:
        free_since = timeline.end_ms[first - 1, timeline.place(computations[-1].name)]
    for step in range(first, timeline.num_steps):
        for op in computations:
            free_since = ledger.add(step, op, free_since)
    num_steps = timeline.num_steps - first
    parts = {part: times / num_steps for part, times in ledger.parts_ms.items()}
    hidden = {
        part: np.maximum(0.0, times - parts[part]) for part, times in _exchanged_ms(timeline, first)
    }
    return Breakdown(parts, sum_waits(ledger.waits, num_steps), hidden)


def _exchanged_ms(timeline: Timeline, first: int) -> Iterator[tuple[str, Times]]:
    """Yield the time of each exchange in a step from the last rank's arrival on, [W]."""
    for place, op in enumerate(timeline.operations):
        if op.is_collective:
            taken = timeline.end_ms[first:, place] - timeline.begin_ms[first:, place]
            yield op.part, taken.mean(axis=0)


_Place = tuple[int, int]
"""A step, and the place of an operation in it."""


class _Ledger:
    """Adds up parts and waits of successive steps."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._places = {op.name: place for place, op in enumerate(timeline.operations)}
        self.parts_ms = {part: np.zeros(timeline.world_size) for part in PARTS}
        self.waits: dict[str, list[tuple[int, Times]]] = {}

    def add(self, step: int, op: Operation, free_since: Times) -> Times:
        """Add a computation of one step; return when it ended, [W].

        Args:
            free_since: [W], when the rank's computation before ended.
        """
        at = (step, self._places[op.name])
        arrival, begin, end = self._times(at)
        for source_at in self._sources(step, op):
            free_since = self._add_exposed(source_at, free_since, arrival)
        self.parts_ms[OTHER] += arrival - free_since
        if op.is_collective:
            self._add_waiting(op.name, begin - arrival, arrival)
        self.parts_ms[op.part] += end - begin
        return end

    def _add_exposed(self, at: _Place, free_since: Times, until: Times) -> Times:
        """Add the part of another stream's work for which ranks compute nothing; return its end.

        Before it, what it has to wait for is added: ids wait for a batch to be read, and an
        exchange for the one before it in its stream.
        """
        op = self._timeline.operations[at[1]]
        before = [*self._sources(at[0], op), *self._last_of_stream(at)]
        for other_at in sorted(before):
            if (self._timeline.end_ms[other_at] > free_since).any():
                free_since = self._add_exposed(other_at, free_since, until)
        arrival, begin, end = (np.clip(ms, free_since, until) for ms in self._times(at))
        self.parts_ms[op.part] += (arrival - free_since) + (end - begin)
        if op.is_collective:
            self._add_waiting(op.name, begin - arrival, self._timeline.arrival_ms[at])
        return end

    def _last_of_stream(self, at: _Place) -> Iterator[_Place]:
        """Yield the place of what a stream did before; nothing at its beginning."""
        step, place = at
        operations = self._timeline.operations
        streams = [op.stream for op in operations]
        for before in range(step * len(streams) + place - 1, -1, -1):
            if streams[before % len(streams)] == operations[place].stream:
                yield divmod(before, len(streams))
                return

    def _add_waiting(self, name: str, waited: Times, arrival: Times) -> None:
        self.parts_ms[WAITING] += waited
        self.waits.setdefault(name, []).append((int(arrival.argmax()), waited))

    def _sources(self, step: int, op: Operation) -> list[_Place]:
        """Return (step, place) of what a computation needs from other streams, in their order."""
        needed = [(step, self._places[name]) for name in op.after]
        if step > 0:
            needed += [(step - 1, self._places[name]) for name in op.after_previous]
        operations = self._timeline.operations
        return sorted(at for at in needed if operations[at[1]].stream != COMPUTE)

    def _times(self, at: _Place) -> tuple[Times, Times, Times]:
        timeline = self._timeline
        return timeline.arrival_ms[at], timeline.begin_ms[at], timeline.end_ms[at]


def sum_waits(noted: Mapping[str, list[tuple[int, Times]]], num_steps: int) -> tuple[Wait, ...]:
    """Sum up the waits for each exchange over the steps."""
    found = []
    for name, of_steps in noted.items():
        caused_ms: dict[int, float] = {}
        for cause, waited in of_steps:
            caused_ms[cause] = caused_ms.get(cause, 0.0) + float(waited.mean())
        cause = max(caused_ms, key=lambda rank: caused_ms[rank])
        waiting = np.sum([waited for _, waited in of_steps], axis=0) / num_steps
        found.append(Wait(name, cause, waiting, caused_ms[cause] / num_steps))
    return tuple(sorted(found, key=lambda wait: -float(wait.waiting_ms.mean())))
