"""Traces a few steps of all ranks of a training: records, compares clocks and gathers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from dlrm_sharded.dense.reference import products_ms
from dlrm_sharded.ranks.distributed import Rank, new_group
from dlrm_sharded.tracing.clocks import ClockOffset, between, compare_clocks
from dlrm_sharded.tracing.recorded import RecordedRank
from dlrm_sharded.tracing.recorder import TraceRecorder

log = logging.getLogger(__name__)

UNREADABLE = (RuntimeError, LookupError, ValueError, TypeError, AttributeError)
"""The errors that a profiler of another version may raise; the training goes on without a trace."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What a rank sends to rank 0.

    Args:
        record: None if it could not be read.
        anchor_ns: time of the rank's clock at which the record has its zero.
        dense_ms: time of the products of dense weights, forward and backward.
    """

    record: RecordedRank | None
    anchor_ns: int
    dense_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded steps of all ranks, by the clock of rank 0.

    Args:
        first_step: number of the first recorded step, from 1 on.
        clock_uncertainty_ms: largest error of the comparison of clocks; 0 on one host.
        dense_ms: times of the products of dense weights on each rank, forward and backward.
    """

    ranks: tuple[RecordedRank, ...]
    first_step: int
    clock_uncertainty_ms: float
    dense_ms: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """Numbers of the steps to trace, from 1 on.

    Args:
        first: recorded, but left out of the trace, as the profiler begins with it.
        last: last traced step.
    """

    first: int
    last: int

    @property
    def count(self) -> int:
        """Number of steps that the profiler slows down."""
        return self.last - self.first + 1


def steps_to_trace(*, start: int, warmup: int, wanted: int, total: int) -> TracedSteps | None:
    """Return the steps to trace after the warm-up of this process, or None if none is left.

    Args:
        start: number of steps trained before this process.
        wanted: number of steps; fewer if the training ends before.
        total: number of steps of the whole training.
    """
    first = start + warmup + 1
    last = min(first + wanted, total)
    return TracedSteps(first, last) if last > first else None


class StepTracer(AbstractContextManager["StepTracer"]):
    """Traces steps; all ranks call its methods together.

    Args:
        local_batch_size: samples of one rank.
        conclude: called on rank 0 with the trace.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: TracedSteps,
        rank: Rank,
        *,
        local_batch_size: int,
        conclude: Callable[[Trace], None],
    ) -> None:
        self.steps = steps
        self.spent_s = 0.0
        self.num_done = 0
        self._model = model
        self._rank = rank
        self._local_batch_size = local_batch_size
        self._conclude = conclude
        self._group = new_group(backend="gloo")
        self._recorder: TraceRecorder | None = None
        self._offsets: tuple[ClockOffset, ...] = ()
        self._began_s = 0.0

    def __exit__(self, *error: object) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
            if self._rank.is_zero:
                log.warning("the training ends within its traced steps, so there is no trace")

    def covers(self, step: int) -> bool:
        """Return whether the profiler records a step."""
        return self.steps.first <= step <= self.steps.last

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the step in the block, if it is one to trace."""
        if not self.covers(number):
            yield
            return
        if self._recorder is None:
            self._began_s = time.perf_counter()
            self._offsets = compare_clocks(self._group)
            self._recorder = TraceRecorder(self._model, self._rank.device)
            self._recorder.start()
        with self._recorder.step():
            yield
        if number == self.steps.last:
            self._recorder.stop()

    def conclude(self) -> None:
        """Gather the trace on rank 0 after the last step, and pass it on."""
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        offsets = [
            between(before, after)
            for before, after in zip(self._offsets, compare_clocks(self._group), strict=True)
        ]
        dense_ms = products_ms(
            self._model, local_batch_size=self._local_batch_size, device=self._rank.device
        )
        mine = RankTrace(_read(recorder, self._rank), recorder.anchor_ns, dense_ms)
        gathered: list[RankTrace] | None = None
        if self._rank.is_zero:
            gathered = [mine] * self._rank.world_size
        dist.gather_object(mine, gathered, group=self._group)
        if gathered is not None:
            self._pass_on(gathered, offsets)
        self.num_done = self.steps.count
        self.spent_s = time.perf_counter() - self._began_s

    def _pass_on(self, gathered: list[RankTrace], offsets: list[ClockOffset]) -> None:
        zero_ns = gathered[0].anchor_ns
        ranks = [
            each.record.moved((each.anchor_ns - offset.ahead_ns - zero_ns) / 1e6)
            for each, offset in zip(gathered, offsets, strict=True)
            if each.record is not None
        ]
        if len(ranks) < len(gathered):
            return  # the ranks have said why
        self._conclude(
            Trace(
                tuple(ranks),
                first_step=self.steps.first + 1,
                clock_uncertainty_ms=max(offset.uncertainty_ns for offset in offsets) / 1e6,
                dense_ms=tuple(each.dense_ms for each in gathered),
            )
        )


def _read(recorder: TraceRecorder, rank: Rank) -> RecordedRank | None:
    try:
        return recorder.record()
    except UNREADABLE as error:
        log.warning("the trace of rank %d cannot be read, so there is none: %r", rank.rank, error)
        return None
