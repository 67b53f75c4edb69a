"""The clock of `measure`: times stages without the host's time to launch them on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from dlrm_sharded.measuring.launch_clock import LaunchClock, Launched
from dlrm_sharded.ranks.stopwatch import Stopwatch

T = TypeVar("T")


@dataclass(slots=True)
class Iteration:
    """Times of the stages in one iteration on this rank, by name of the stage, in ms.

    A stage that several modules have is the sum of theirs.

    Args:
        times_ms: time of the stage.
        launch_ms: host time to launch the stage, for stages launched while the device slept.
        is_exposed: whether the sleep was too short for that, so that the time of the stage
            contains host time.
    """

    times_ms: dict[str, float] = field(default_factory=dict)
    launch_ms: dict[str, float] = field(default_factory=dict)
    is_exposed: dict[str, bool] = field(default_factory=dict)

    def add(self, name: str, time_ms: float) -> None:
        """Add a time to the time of a stage."""
        self.times_ms[name] = self.times_ms.get(name, 0.0) + time_ms

    def add_launched(self, name: str, launched: Launched) -> None:
        """Add the times of a stage that was launched while the device slept."""
        [time_ms] = launched.intervals_ms
        self.add(name, time_ms)
        self.launch_ms[name] = self.launch_ms.get(name, 0.0) + launched.launch_ms
        self.is_exposed[name] = self.is_exposed.get(name, False) or launched.is_exposed


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
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._clock = LaunchClock(device)
            self._signal = torch.zeros(1, device=device)

    def timed(self, name: str, work: Callable[[], T], *, waits: bool = False) -> T:
        """Time a stage and return its result.

        Args:
            waits: whether the host waits for the device within the stage, so that it cannot be
                launched beforehand; its time contains host time.
        """
        dist.barrier(self._group)
        if self._on_cuda and not waits:
            return self._timed_behind_sleep(name, work)
        watch = Stopwatch(self._device)
        watch.mark()
        result = work()
        watch.mark()
        [time_ms] = watch.intervals_ms()
        self._iteration.add(name, time_ms)
        return result

    def finish_iteration(self) -> Iteration:
        """Return the times since the last call, and adapt the length of the sleep to them."""
        finished, self._iteration = self._iteration, Iteration()
        if self._on_cuda:
            queueing_ms = self._clock.longest_queueing_ms
            self._clock.adapt(max_over_ranks(queueing_ms, self._device, self._group))
        return finished

    def _timed_behind_sleep(self, name: str, work: Callable[[], T]) -> T:
        self._clock.begin()
        dist.all_reduce(self._signal, group=self._group)
        self._clock.mark()
        result = work()
        self._clock.mark()
        self._iteration.add_launched(name, self._clock.end())
        return result


def max_over_ranks(value: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Return the largest of the ranks' values; all ranks of the group call it together."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return float(tensor)
