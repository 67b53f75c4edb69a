"""What is measured of a GPU: its fingerprint, its probe, and its conversions of numbers."""

import pytest
import torch

from dlrm_sharded.hardware import probing
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.hardware.fingerprint import GpuFingerprint
from dlrm_sharded.measuring import codec_times
from dlrm_sharded.measuring.codec_times import measure_codecs
from tests.cuda_stand_ins import GPU, NAME, Gpu
from tests.nvidia import install_nvidia_smi
from tests.sleeping_gpu import HOST_MS


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"ROWS": 256, "CACHED_ROWS": 16, "IDS": 64, "MATRIX": 8}.items():
        monkeypatch.setattr(probing, name, {"cuda": size})
    monkeypatch.setattr(probing, "ROUNDS", 1)
    monkeypatch.setattr(probing, "BUSY_ROUNDS", 1)


@pytest.mark.usefixtures("small_probe")
def test_the_hardware_is_the_gpu(gpu: Gpu, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's peak does not contain the probe's memory."""
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path, 1))
    monkeypatch.setenv("DLRM_SHARDED_CACHE", str(tmp_path / "cache"))
    gpu.peak_bytes = 10**9
    hardware = local_hardware(GPU)
    assert hardware.name == NAME
    assert hardware.fingerprint is not None
    assert hardware.fingerprint.gpu == GpuFingerprint(
        name=NAME,
        capability="9.0",
        memory_gib=80,
        memory_gb_per_s=3352,
        nvlinks=None,
        pcie=None,
        num_gpus=1,
        nccl="2.27.5",
        driver="580.65.06",
    )
    assert hardware.probe is not None
    assert hardware.probe.copy_gb_per_s > 0
    assert gpu.calls[-2:] == ["empty_cache", "reset_peak_memory_stats"]
    assert gpu.peak_bytes == 0


def test_a_repeat_of_the_probe_is_its_own_work_alone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing.time, "perf_counter", gpu.perf_counter)
    gpu.queue(50.0)  # what was launched before
    once_s = probing._timed_s(lambda: gpu.queue(2.0), GPU)
    assert 1e3 * once_s == pytest.approx(2.0 + HOST_MS)


@pytest.mark.usefixtures("rank")
def test_conversions_are_timed_until_the_device_is_done(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_times, "MEGABYTES", {"cuda": 1})
    monkeypatch.setattr(codec_times, "DEVICE_PRECISIONS", {"cuda": ("fp32", "fp16")})
    times = measure_codecs(torch.device("cuda", 0))
    assert times.keys() == {"fp16"}
    assert gpu.calls.count("synchronize") > 2
