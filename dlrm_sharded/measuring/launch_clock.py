"""Times the work of a device without the host's time to launch it.

In training, the host launches work long before a GPU gets to it. A measurement therefore lets the
GPU sleep while the host launches, and times the work from the end of the sleep.
"""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch

FIRST_SLEEP_MS, MIN_SLEEP_MS, MAX_SLEEP_MS = 1.0, 0.5, 20.0
"""Length of the device's sleep before work: at first, and the limits of later ones."""

SLEEP_SLACK = 2.0
"""Length of the sleep relative to the longest time that a host took to launch the work."""

CALIBRATION_CYCLES = 2_000_000
"""Cycles of a sleep that measures the device's clock rate, about 1 ms at its highest rate."""

WARM_UP_MS = 75.0
"""A GPU sleeps for this long before its clock rate counts: an idle GPU raises it meanwhile."""


@dataclass(frozen=True, slots=True)
class Launched:
    """Times of work that was launched.

    Args:
        intervals_ms: time of the device between successive marks.
        launch_ms: time of the host from the first mark to the last; 0 on a CPU, which launches
            nothing.
        is_exposed: whether the sleep was too short for that, so that the intervals contain time of
            the host.
    """

    intervals_ms: list[float]
    launch_ms: float = 0.0
    is_exposed: bool = False


class LaunchClock:
    """Times work between marks: on CUDA behind a sleep of the device, else by the host's clock.

    Attributes:
        longest_queueing_ms: longest time, since `adapt`, from the sleep to the last launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._rate = _sleep_rate(device) if device.type == "cuda" else None
        self._sleep_ms = FIRST_SLEEP_MS
        self._num_adapted = 0
        self._was_exposed = False
        self._events: list[Any] = []
        self._looked_s: list[float] = []
        self.longest_queueing_ms = 0.0

    def begin(self) -> None:
        """Let the device sleep, once it has done everything else."""
        if self._rate is not None:
            torch.cuda.synchronize()
        self._events, self._looked_s = [], [time.perf_counter()]
        if self._rate is not None:
            torch.cuda._sleep(round(self._sleep_ms * self._rate.cycles_per_ms))

    def mark(self) -> None:
        """End an interval and begin the next one."""
        if self._rate is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._looked_s.append(time.perf_counter())

    def end(self) -> Launched:
        """Wait for the device and return the times since `begin`; there were at least two marks."""
        began_s, *looked_s = self._looked_s
        if self._rate is None:
            return Launched([1e3 * (b - a) for a, b in itertools.pairwise(looked_s)])
        is_exposed = self._events[0].query()
        torch.cuda.synchronize()
        self._was_exposed |= is_exposed
        queueing_ms = 1e3 * (looked_s[-1] - began_s)
        self.longest_queueing_ms = max(self.longest_queueing_ms, queueing_ms)
        return Launched(
            [a.elapsed_time(b) for a, b in itertools.pairwise(self._events)],
            launch_ms=1e3 * (looked_s[-1] - looked_s[0]),
            is_exposed=is_exposed,
        )

    def adapt(self, queueing_ms: float) -> None:
        """Adapt later sleeps to the longest time that work took to be launched.

        The first call does not count, because work that runs for the first time allocates memory.
        """
        self._num_adapted += 1
        if self._rate is not None and self._num_adapted > 1:
            self._sleep_ms = min(max(SLEEP_SLACK * queueing_ms, MIN_SLEEP_MS), MAX_SLEEP_MS)
            if self._was_exposed:  # perhaps because the device's clock has another rate by now
                self._rate.measure()
        self._was_exposed = False
        self.longest_queueing_ms = 0.0


class SleepRate:
    """How many cycles of `torch.cuda._sleep` take 1 ms on the current GPU.

    Attributes:
        cycles_per_ms: rate at the last measurement.
    """

    def __init__(self) -> None:
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        while start.elapsed_time(self.measure()) < WARM_UP_MS:
            pass

    def measure(self) -> Any:
        """Measure the rate; return the event at the end of the measurement."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        self.cycles_per_ms = CALIBRATION_CYCLES / start.elapsed_time(end)
        return end


@functools.cache
def _sleep_rate(device: torch.device) -> SleepRate:
    """Return the rate of the current GPU, `device`, which all clocks of the process share."""
    return SleepRate()
