"""The clock of the stages, on a GPU that only records its calls."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_sharded.measuring import stage_clock
from dlrm_sharded.measuring.launch_clock import FIRST_SLEEP_MS
from dlrm_sharded.measuring.stage_clock import StageClock
from tests.cuda import HOST_MS, Gpu, install_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    def on_the_cpu(*size: int, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        return torch.tensor(0.0)

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any) -> None:
        gpu.calls.append(("all_reduce", group))

    install_gpu(monkeypatch, gpu)
    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    monkeypatch.setattr(dist, "barrier", lambda group: gpu.calls.append(("barrier", group)))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(stage_clock, "max_over_ranks", lambda value, device, group: value)
    return gpu


def clock_of(gpu: Gpu) -> StageClock:
    """A clock that knows how fast the GPU is."""
    clock = StageClock(torch.device("cuda", 0), "group")  # type: ignore[arg-type]
    gpu.calls.clear()
    return clock


def slept_before_stages(gpu: Gpu) -> list[Any]:
    """Lengths of the sleeps but those that measure the rate of the device's clock."""
    calls = itertools.pairwise(gpu.calls)
    return [call[1] for before, call in calls if before == "synchronize" and call[0] == "sleep"]


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
    slept_ms = slept_before_stages(gpu)
    queueing_ms = slow_ms + 2 * HOST_MS
    # the first iteration takes long anyway, and decides nothing
    assert slept_ms == [FIRST_SLEEP_MS] * 4 + [2 * queueing_ms] * 4
    assert exposed == [True, True, False, False]
    assert once.times_ms["fwd_compute"] == pytest.approx(0.5)


def test_a_stage_on_a_cpu_is_between_two_looks_at_its_clock(gpu: Gpu) -> None:
    clock = StageClock(torch.device("cpu"), None)
    assert clock.timed("fwd_compute", gpu.stage(launch_ms=0.25, device_ms=0.5)) == "result"
    assert gpu.calls == [("barrier", None), "work"]
    once = clock.finish_iteration()
    assert once.times_ms == pytest.approx({"fwd_compute": 0.25 + HOST_MS})
    assert once.launch_ms == once.is_exposed == {}
