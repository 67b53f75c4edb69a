"""The clock of `measure`: times stages without the host's time to launch them on a GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from dlrm_sharded.ranks.stopwatch import Stopwatch

T = TypeVar("T")

FIRST_SLEEP_MS, MIN_SLEEP_MS, MAX_SLEEP_MS = 1.0, 0.5, 10.0
"""Length of the device's sleep before a stage: at first, and the limits of later ones."""

SLEEP_SLACK = 2.0
"""Length of the sleep relative to the longest time that a host took to launch a stage."""

CALIBRATION_CYCLES = 2_000_000
"""Cycles of the sleep that measures the device's clock rate, about 1 ms."""


@dataclass(slots=True)
class Iteration:
    """Times of the stages in one iteration on this rank, by name of the stage, in ms.

    Args:
        times_ms: time of the stage.
        launch_ms: host time to launch the stage, for stages launched while the device slept.
        is_exposed: whether the sleep was too short for that, so that the time of the stage
            contains host time.
    """

    times_ms: dict[str, float] = field(default_factory=dict)
    launch_ms: dict[str, float] = field(default_factory=dict)
    is_exposed: dict[str, bool] = field(default_factory=dict)


class StageClock:
    """Times stages, each started from a barrier; all ranks of the group do the same with it.

    In training, the host launches work long before the device gets to it. On CUDA a stage is
    therefore launched while the device sleeps, and timed from the end of the sleep. The ranks'
    sleeps are of about the same length; an all-reduce behind them lets the devices start together.

    Args:
        group: ranks that share the stages; None for all ranks of the job.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device = device
        self._group = group
        self._iteration = Iteration()
        self._num_iterations = 0
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._cycles_per_ms = _cycles_per_ms(device)
            self._sleep_ms = FIRST_SLEEP_MS
            self._longest_queueing_ms = 0.0
            self._signal = torch.zeros(1, device=device)

    def timed(self, name: str, work: Callable[[], T], *, waits: bool = False) -> T:
        """Time a stage and return its result.

        Args:
            waits: whether the host waits for the device within the stage, so that it cannot be
                launched beforehand; its time contains that of the host.
        """
        dist.barrier(self._group)
        if self._on_cuda and not waits:
            return self._timed_behind_sleep(name, work)
        watch = Stopwatch(self._device)
        watch.mark()
        result = work()
        watch.mark()
        [self._iteration.times_ms[name]] = watch.intervals_ms()
        return result

    def finish_iteration(self) -> Iteration:
        """Return the times since the last call, and adapt the length of the sleep to them."""
        finished, self._iteration = self._iteration, Iteration()
        self._num_iterations += 1
        if self._on_cuda:
            needed_ms = SLEEP_SLACK * max_over_ranks(
                self._longest_queueing_ms, self._device, self._group
            )
            if self._num_iterations > 1:  # the first iteration takes long, as it allocates memory
                self._sleep_ms = min(max(needed_ms, MIN_SLEEP_MS), MAX_SLEEP_MS)
            self._longest_queueing_ms = 0.0
        return finished

    def _timed_behind_sleep(self, name: str, work: Callable[[], T]) -> T:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        queueing_started = time.perf_counter()
        torch.cuda._sleep(round(self._sleep_ms * self._cycles_per_ms))
        dist.all_reduce(self._signal, group=self._group)
        start.record()
        launch_started = time.perf_counter()
        result = work()
        launch_ended = time.perf_counter()
        self._iteration.is_exposed[name] = start.query()
        end.record()
        torch.cuda.synchronize()
        self._iteration.times_ms[name] = start.elapsed_time(end)
        self._iteration.launch_ms[name] = 1e3 * (launch_ended - launch_started)
        queueing_ms = 1e3 * (launch_ended - queueing_started)
        self._longest_queueing_ms = max(self._longest_queueing_ms, queueing_ms)
        return result


def max_over_ranks(value: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the largest of the ranks' values; all ranks of the group call it together."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return float(tensor)


@functools.cache
def _cycles_per_ms(device: torch.device) -> float:
    """Return how many cycles of `torch.cuda._sleep` take 1 ms on the current GPU, `device`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CALIBRATION_CYCLES)  # an idle GPU first has to raise its clock rate
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return CALIBRATION_CYCLES / start.elapsed_time(end)
