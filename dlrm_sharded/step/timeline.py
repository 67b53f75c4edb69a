"""Runs the operations of a step on all ranks in a simulation, and says when each began and ended.

Letters: N steps, O operations of a step, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def run_steps(operations: Sequence[Operation], *, num_steps: int = 3, seed: int = 0) -> Timeline:
    """Let every rank run the operations in their order, step after step.

    An operation begins when its stream is free and what it comes after has ended. Times vary from
    step to step as the operations' spreads say.

    Args:
        operations: at least one, those of a step in the order in which a rank issues them.
        seed: seed of the variation.
    """
    rng = np.random.default_rng(seed)
    places = {op.name: place for place, op in enumerate(operations)}
    num_ranks = len(operations[0].times_ms)
    shape = (num_steps, len(operations), num_ranks)
    arrival, begin, end = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    free = {stream: np.zeros(num_ranks) for stream in STREAMS}
    for step in range(num_steps):
        for place, op in enumerate(operations):
            ready = [free[op.stream], *(end[step, places[name]] for name in op.after)]
            if step > 0:
                ready += [end[step - 1, places[name]] for name in op.after_previous]
            arrival[step, place] = np.max(ready, axis=0)
            begin[step, place] = arrival[step, place]
            if op.is_collective:
                begin[step, place] = arrival[step, place].max()
            end[step, place] = begin[step, place] + _varied(op, rng)
            free[op.stream] = end[step, place]
    return Timeline(tuple(operations), arrival, begin, end)


def _varied(op: Operation, rng: np.random.Generator) -> Times:
    """Return the times of an operation in one step, [W], with its mean and spread."""
    if op.spread == 0:
        return op.times_ms
    sigma = np.sqrt(np.log1p(op.spread**2))
    factors: Times = rng.lognormal(-(sigma**2) / 2, sigma, len(op.times_ms))
    return op.times_ms * factors
