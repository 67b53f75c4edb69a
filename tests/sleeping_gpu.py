"""A GPU that sleeps and computes in a simulation, in the place of torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlrm_sharded.ranks import launch_clock

CYCLES_PER_MS = 1_600_000
HOST_MS = 0.0625
"""The host takes this long between two looks at the clock, unless it works."""


class Gpu:
    """Calls in order, and a device and a host whose times follow from the calls.

    Args:
        raises_after_ms: work after which the device has raised its clock to its highest rate.
        idle_share: rate of the clock before that.
    """

    def __init__(self, *, raises_after_ms: float = 0.0, idle_share: float = 1.0) -> None:
        self.calls: list[Any] = []
        self.host_ms = 0.0
        self.device_ms = 0.0
        """When the device will have done what was queued so far."""
        self.cycles_per_ms = CYCLES_PER_MS
        self._raises_after_ms = raises_after_ms
        self._idle_share = idle_share
        self._busy_ms = 0.0

    def sleep(self, cycles: int) -> None:
        is_raised = self._busy_ms >= self._raises_after_ms
        sleep_ms = cycles / self.cycles_per_ms / (1.0 if is_raised else self._idle_share)
        self.calls.append(("sleep", pytest.approx(sleep_ms)))
        self.queue(sleep_ms)

    def queue(self, work_ms: float) -> None:
        self.device_ms = max(self.device_ms, self.host_ms) + work_ms
        self._busy_ms += work_ms

    def synchronize(self, device: Any = None) -> None:
        self.calls.append("synchronize")
        self.wait_until(self.device_ms)

    def wait_until(self, time_ms: float) -> None:
        self.host_ms = max(self.host_ms, time_ms)

    def perf_counter(self) -> float:
        self.host_ms += HOST_MS
        return self.host_ms / 1e3

    def stage(self, launch_ms: float, device_ms: float) -> Callable[[], str]:
        """A stage that the host launches and the device computes."""

        def work() -> str:
            self.calls.append("work")
            self.host_ms += launch_ms
            self.queue(device_ms)
            return "result"

        return work


class _Event:
    """An event that is reached when the device has done what was queued before it."""

    gpu: Gpu

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._has_time = enable_timing

    def record(self, stream: Any = None) -> None:
        self.gpu.calls.append("event")
        self.gpu.queue(0.0)
        self.reached_ms = self.gpu.device_ms

    def query(self) -> bool:
        return self.reached_ms <= self.gpu.host_ms

    def synchronize(self) -> None:
        self.gpu.calls.append("wait")
        self.gpu.wait_until(self.reached_ms)

    def elapsed_time(self, end: "_Event") -> float:
        assert self._has_time
        assert end._has_time
        assert end.query(), "the device has not done what is before this event"
        return end.reached_ms - self.reached_ms


def events_of(gpu: Gpu) -> type[_Event]:
    """The class of the events of a GPU."""
    return type("Event", (_Event,), {"gpu": gpu})


def install_gpu(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Let the host's clock, and the part of `torch.cuda` that clocks call, be those of `gpu`."""
    monkeypatch.setattr(torch.cuda, "Event", events_of(gpu))
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(launch_clock.time, "perf_counter", gpu.perf_counter)
    launch_clock._sleep_rate.cache_clear()
