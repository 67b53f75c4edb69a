"""The load under which ranks computed: waits for cores, and the states of their GPUs."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from dlrm_sharded.ranks import machine_load
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.gpus import GpuState, GpuStates
from dlrm_sharded.ranks.machine_load import LoadWatch, MachineLoad
from tests.cuda import GPU, Gpu, install_gpu

FAST, CAPPED = GpuState(1980, 2619, 0), GpuState(1410, 2619, 4)


def test_a_cpu_has_no_states_of_gpus(rank: Rank) -> None:
    found = LoadWatch(rank.device).conclude()
    assert (found.gpus, found.slowed_gpu) == ((), None)
    assert len(found.hosts) == 1
    assert 0 <= found.core_wait <= 1


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    ("states", "gpus"),
    [([FAST, CAPPED], (GpuStates(FAST, CAPPED),)), ([None, FAST], ()), ([FAST, None], ())],
    ids=["known", "unknown_before", "unknown_after"],
)
def test_the_state_of_a_busy_gpu(states, gpus, monkeypatch):
    gpu = Gpu()
    install_gpu(monkeypatch, gpu)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="8-4")
    )
    asked = []

    def answer(uuid: str) -> GpuState | None:
        assert gpu.device_ms > gpu.host_ms, "an idle GPU lowers its clocks"
        asked.append(uuid)
        return states[len(asked) - 1]

    monkeypatch.setattr(machine_load, "gpu_state", answer)
    assert LoadWatch(GPU).conclude().gpus == gpus
    assert asked == ["GPU-8-4", "GPU-8-4"]
    assert gpu.device_ms <= gpu.host_ms, "what is measured next would be launched ahead of the GPU"


def test_which_gpu_was_slowed_is_said():
    steady = MachineLoad({}, 0.0, 0.0, (GpuStates(FAST, FAST),) * 4)
    assert steady.slowed_gpu is None
    assert MachineLoad({}, 0.0, 0.0).slowed_gpu is None
    gpus = (*steady.gpus[:2], GpuStates(FAST, CAPPED), steady.gpus[3])
    assert dataclasses.replace(steady, gpus=gpus).slowed_gpu == (
        "the GPU of rank 2 had 1980 MHz before and 1410 MHz after (reasons 0x0 and 0x4; "
        "nvidia-smi -q -d PERFORMANCE explains them)"
    )
