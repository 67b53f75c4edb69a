"""The clock of the stages, on a GPU that only writes down what it is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_sharded.calibration import stage_clock
from dlrm_sharded.calibration.stage_clock import (
    FIRST_SLEEP_MS,
    MAX_SLEEP_MS,
    MIN_SLEEP_MS,
    StageClock,
)

CYCLES_PER_MS = 1_600_000
HOST_MS = 0.0625
"""The host takes this long between two looks at the clock, unless it works."""


class Gpu:
    """Calls in order, and a device and a host whose times follow from the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.host_ms = 0.0
        self.device_ms = 0.0
        """When the device will have done what was queued so far."""

    def sleep(self, cycles: int) -> None:
        self.calls.append(("sleep", pytest.approx(cycles / CYCLES_PER_MS)))
        self.queue(cycles / CYCLES_PER_MS)

    def queue(self, work_ms: float) -> None:
        self.device_ms = max(self.device_ms, self.host_ms) + work_ms

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.host_ms = max(self.host_ms, self.device_ms)

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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            gpu.calls.append("event")
            gpu.queue(0.0)
            self.reached_ms = gpu.device_ms

        def query(self) -> bool:
            return self.reached_ms <= gpu.host_ms

        def synchronize(self) -> None:
            gpu.calls.append("wait")
            gpu.host_ms = max(gpu.host_ms, self.reached_ms)

        def elapsed_time(self, end: "Event") -> float:
            return end.reached_ms - self.reached_ms

    def on_the_cpu(*size: int, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        return torch.tensor(0.0)

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any) -> None:
        gpu.calls.append(("all_reduce", group))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    monkeypatch.setattr(dist, "barrier", lambda group: gpu.calls.append(("barrier", group)))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(stage_clock.time, "perf_counter", gpu.perf_counter)
    monkeypatch.setattr(stage_clock, "max_over_ranks", lambda value, device, group: value)
    stage_clock._cycles_per_ms.cache_clear()
    return gpu


def clock_of(gpu: Gpu) -> StageClock:
    """A clock that knows how fast the GPU is."""
    clock = StageClock(torch.device("cuda", 0), "group")  # type: ignore[arg-type]
    gpu.calls.clear()
    return clock


def test_a_stage_is_launched_behind_a_sleep(gpu: Gpu) -> None:
    clock = clock_of(gpu)
    assert clock.timed("fwd_compute", gpu.stage(launch_ms=0.25, device_ms=0.5)) == "result"
    assert gpu.calls == [
        ("barrier", "group"),
        "synchronize",
        ("sleep", FIRST_SLEEP_MS),
        ("all_reduce", "group"),
        "event",
        "work",
        "event",
        "synchronize",
    ]
    once = clock.finish_iteration()
    assert once.times_ms == pytest.approx({"fwd_compute": 0.5})
    assert once.launch_ms == pytest.approx({"fwd_compute": 0.25 + HOST_MS})
    assert once.is_exposed == {"fwd_compute": False}


def test_a_stage_that_waits_for_the_device_is_not(gpu: Gpu) -> None:
    clock = clock_of(gpu)
    clock.timed("input_dist", gpu.stage(launch_ms=0.25, device_ms=0.5), waits=True)
    assert gpu.calls == [("barrier", "group"), "synchronize", "event", "work", "event", "wait"]
    once = clock.finish_iteration()
    assert once.times_ms == pytest.approx({"input_dist": 0.75})
    assert once.launch_ms == once.is_exposed == {}


def test_the_sleep_becomes_twice_as_long_as_the_longest_launch(gpu: Gpu) -> None:
    clock = clock_of(gpu)
    slow_ms = 3.0
    exposed = []
    for _ in range(4):
        clock.timed("fwd_compute", gpu.stage(launch_ms=slow_ms, device_ms=0.5))
        clock.timed("fwd_comm", gpu.stage(launch_ms=0.25, device_ms=0.5))
        once = clock.finish_iteration()
        assert once.times_ms["fwd_comm"] == pytest.approx(0.5)
        assert not once.is_exposed["fwd_comm"]
        exposed.append(once.is_exposed["fwd_compute"])
    slept_ms = [call[1] for call in gpu.calls if call[0] == "sleep"]
    queueing_ms = slow_ms + 2 * HOST_MS
    # the first iteration takes long anyway, and decides nothing
    assert slept_ms == [FIRST_SLEEP_MS] * 4 + [2 * queueing_ms] * 4
    assert exposed == [True, True, False, False]
    assert once.times_ms["fwd_compute"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("launch_ms", "sleep_ms"), [(1e-6, MIN_SLEEP_MS), (1000.0, MAX_SLEEP_MS)], ids=["min", "max"]
)
def test_the_sleep_has_limits(gpu: Gpu, launch_ms: float, sleep_ms: float) -> None:
    clock = clock_of(gpu)
    for _ in range(3):
        clock.timed("fwd_compute", gpu.stage(launch_ms=launch_ms, device_ms=0.5))
        clock.finish_iteration()
    assert gpu.calls[-6] == ("sleep", sleep_ms)


def test_a_stage_on_a_cpu_is_between_two_looks_at_its_clock(gpu: Gpu) -> None:
    clock = StageClock(torch.device("cpu"), None)
    assert clock.timed("fwd_compute", gpu.stage(launch_ms=0.25, device_ms=0.5)) == "result"
    assert gpu.calls == [("barrier", None), "work"]
    once = clock.finish_iteration()
    assert once.times_ms == pytest.approx({"fwd_compute": 0.25 + HOST_MS})
    assert once.launch_ms == once.is_exposed == {}
