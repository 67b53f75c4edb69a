"""Work is launched while the GPU sleeps, whatever rate the GPU's clock has."""

import pytest
import torch

from dlrm_sharded.measuring.launch_clock import (
    CALIBRATION_CYCLES,
    MIN_SLEEP_MS,
    SLEEP_SLACK,
    LaunchClock,
)
from tests.cuda import CYCLES_PER_MS, HOST_MS, Gpu, install_gpu

IDLE_SHARE = 345 / 1980
"""Clock rates of an H100 that idles and of one that works."""


def clock_of(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> LaunchClock:
    install_gpu(monkeypatch, gpu)
    clock = LaunchClock(torch.device("cuda", 0))
    gpu.calls.clear()
    return clock


def launch(clock: LaunchClock, gpu: Gpu, *parts: tuple[float, float]):
    clock.begin()
    clock.mark()
    for launch_ms, device_ms in parts:
        gpu.stage(launch_ms, device_ms)()
        clock.mark()
    return clock.end()


def test_parts_are_times_of_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    found = launch(clock_of(gpu, monkeypatch), gpu, (0.25, 0.5), (0.125, 2.0))
    assert found.intervals_ms == pytest.approx([0.5, 2.0])
    assert found.launch_ms == pytest.approx(0.375 + 2 * HOST_MS)
    assert not found.is_exposed


def test_an_idle_gpu_raises_its_clock_before_its_rate_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each sleep is 5.7 times too short."""
    gpu = Gpu(raises_after_ms=45.0, idle_share=IDLE_SHARE)
    clock = clock_of(gpu, monkeypatch)
    gpu.queue(45.0)
    launch(clock, gpu, (0.1, 0.5))
    [slept_ms] = [call[1] for call in gpu.calls if call[0] == "sleep"]
    assert slept_ms == 1.0


def test_a_process_warms_its_gpu_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    clock_of(gpu, monkeypatch)
    LaunchClock(torch.device("cuda", 0))
    assert gpu.calls == []


def test_the_rate_is_measured_again_after_an_exposed_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu()
    clock = clock_of(gpu, monkeypatch)
    gpu.cycles_per_ms = 6 * CYCLES_PER_MS  # sleeps are now 6 times too short
    exposed = []
    for _ in range(4):
        exposed.append(launch(clock, gpu, (0.4, 0.5)).is_exposed)
        clock.adapt(clock.longest_queueing_ms)
    assert exposed == [True, True, False, False]
    calibrations = [c for c in gpu.calls if c == ("sleep", CALIBRATION_CYCLES / gpu.cycles_per_ms)]
    assert len(calibrations) == 1


def test_the_first_launch_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, as it allocates memory."""
    gpu = Gpu()
    clock = clock_of(gpu, monkeypatch)
    for launch_ms in (50.0, 2.0, 2.0, 1e-6, 1e-6):
        launch(clock, gpu, (launch_ms, 0.5))
        clock.adapt(clock.longest_queueing_ms)
    slept_ms = [c[1] for c in gpu.calls if c[0] == "sleep" and c[1] != 1.25]  # 1.25 measures rates
    second_ms = SLEEP_SLACK * (2.0 + 2 * HOST_MS)
    assert slept_ms == [1.0, 1.0, second_ms, second_ms, MIN_SLEEP_MS]


def test_a_cpu_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    install_gpu(monkeypatch, gpu)
    clock = LaunchClock(torch.device("cpu"))
    found = launch(clock, gpu, (0.25, 0.0), (0.5, 0.0))
    assert found.intervals_ms == pytest.approx([0.25 + HOST_MS, 0.5 + HOST_MS])
    assert (found.launch_ms, found.is_exposed) == (0.0, False)
    assert gpu.calls == ["work", "work"]
