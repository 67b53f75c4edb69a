"""Runs the operations of a step on all ranks in a simulation, and says when each began and ended.

Letters: N steps, O operations of a step, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.step.core_sharing import CoreSharing

COMPUTE = "compute"
EXCHANGE = "exchange"
READER = "reader"
STREAMS = (COMPUTE, EXCHANGE, READER)

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Work that every rank does once in a step.

    Args:
        name: unique in the step.
        part: what its time counts for, one of `PARTS`.
        times_ms: [W], how long it takes on each rank once it has begun.
        stream: one of `STREAMS`.
        is_collective: whether it begins when the last rank has arrived.
        after: operations of the same step, listed before, that must have ended.
        after_previous: operations of the step before that must have ended.
        spread: standard deviation of the times over steps, relative to their mean.
    """

    name: str
    part: str
    times_ms: Times
    stream: str = COMPUTE
    is_collective: bool = False
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the operations of some steps began and ended on every rank, in ms.

    Args:
        arrival_ms: [N, O, W], when a rank was ready for an operation.
        begin_ms: [N, O, W]; later than the arrival if other ranks arrived later.
        end_ms: [N, O, W].
    """

    operations: tuple[Operation, ...]
    arrival_ms: Times
    begin_ms: Times
    end_ms: Times

    @property
    def num_steps(self) -> int:
        return len(self.end_ms)

    @property
    def world_size(self) -> int:
        return int(self.end_ms.shape[2])

    @property
    def step_ends_ms(self) -> Times:
        """When each step has ended on the last rank, [N]."""
        computing = [op.stream == COMPUTE for op in self.operations]
        ends: Times = self.end_ms[:, computing].max(axis=(1, 2))
        return ends

    @property
    def step_ms(self) -> float:
        """Mean time of a step, without the first one, which begins with nothing under way."""
        ends = self.step_ends_ms
        if len(ends) == 1:
            return float(ends[0])
        return float(ends[-1] - ends[0]) / (len(ends) - 1)

    def place(self, name: str) -> int:
        """Return the place of an operation in a step."""
        return [op.name for op in self.operations].index(name)


def run_steps(
    operations: Sequence[Operation],
    *,
    num_steps: int = 3,
    seed: int = 0,
    sharing: CoreSharing | None = None,
) -> Timeline:
    """Let every rank run the operations in their order, step after step.

    An operation begins when its stream is free and what it comes after has ended. Times vary from
    step to step as the operations' spreads say.

    Args:
        operations: at least one, those of a step in the order in which a rank issues them.
        seed: seed of the variation.
        sharing: the cores that the ranks of a host share; None if each has its own.
    """
    rng = np.random.default_rng(seed)
    places = {op.name: place for place, op in enumerate(operations)}
    num_ranks = len(operations[0].times_ms)
    shape = (num_steps, len(operations), num_ranks)
    arrival, begin, end = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    free = {stream: np.zeros(num_ranks) for stream in STREAMS}
    runs = {} if sharing is None else _runs_of_computation(operations)
    for step in range(num_steps):
        times = [_varied(op, rng) for op in operations]
        for place, op in enumerate(operations):
            ready = [free[op.stream], *(end[step, places[name]] for name in op.after)]
            if step > 0:
                ready += [end[step - 1, places[name]] for name in op.after_previous]
            arrival[step, place] = np.max(ready, axis=0)
            begin[step, place] = arrival[step, place]
            if op.is_collective:
                begin[step, place] = arrival[step, place].max()
            if sharing is not None and place in runs:
                _share_cores(times, runs[place], begin[step, place], sharing)
            end[step, place] = begin[step, place] + times[place]
            free[op.stream] = end[step, place]
    return Timeline(tuple(operations), arrival, begin, end)


def _runs_of_computation(operations: Sequence[Operation]) -> dict[int, list[int]]:
    """Return the places of computations that follow each other without a collective.

    Keys are the first places. A run ends with the step, though ranks go on computing.
    """
    runs: dict[int, list[int]] = {}
    first = None
    for place, op in enumerate(operations):
        if op.is_collective:
            first = None
        elif op.stream == COMPUTE:
            first = place if first is None else first
            runs.setdefault(first, []).append(place)
    return runs


def _share_cores(
    times: list[Times], places: Sequence[int], begins_ms: Times, sharing: CoreSharing
) -> None:
    """Lengthen the computations of a run, which all ranks of a host do at about the same time."""
    work_ms = np.sum([times[place] for place in places], axis=0)
    taken_ms = sharing.ends_ms(begins_ms, work_ms) - begins_ms
    factors = np.divide(taken_ms, work_ms, out=np.ones_like(work_ms), where=work_ms > 0)
    for place in places:
        times[place] = times[place] * factors


def _varied(op: Operation, rng: np.random.Generator) -> Times:
    """Return the times of an operation in one step, [W], with its mean and spread."""
    if op.spread == 0:
        return op.times_ms
    sigma = np.sqrt(np.log1p(op.spread**2))
    factors: Times = rng.lognormal(-(sigma**2) / 2, sigma, len(op.times_ms))
    return op.times_ms * factors
