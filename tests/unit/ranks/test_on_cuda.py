"""Ranks take their GPU, know its memory, watch NCCL, time by events, and read results late."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch

from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.plans.topology_settings import TopologySettings
from dlrm_sharded.ranks import distributed
from dlrm_sharded.ranks.device_memory import used_and_available_bytes
from dlrm_sharded.ranks.distributed import Rank, detect_topology
from dlrm_sharded.ranks.stopwatch import Stopwatch
from dlrm_sharded.training import progress
from dlrm_sharded.training.training_result import peak_memory_gib
from dlrm_sharded.training.window import ClosedWindow, Window
from tests.cuda import FREE_BYTES, GPU, NAME, TOTAL_BYTES, Gpu, install_gpu
from tests.unit.checkpoint.cases import run_state

RANK = Rank(0, 1, 0, 1, GPU)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    install_gpu(monkeypatch, gpu)
    return gpu


@pytest.fixture
def on_gpu(rank: Rank) -> Rank:
    """The only rank of a job, on a GPU; its group is of gloo all the same."""
    return dataclasses.replace(rank, device=GPU)


def test_a_rank_takes_its_own_gpu(gpu: Gpu) -> None:
    distributed._prepare_device(RANK)
    assert gpu.calls == [("set_device", GPU)]


def test_more_ranks_than_gpus(gpu: Gpu) -> None:
    second = Rank(3, 4, 1, 2, torch.device("cuda", 1))
    with pytest.raises(ConfigError, match="rank 3 is number 1 on its host and finds 1 GPUs"):
        distributed._prepare_device(second)
    assert gpu.calls == []


@pytest.mark.usefixtures("no_torchrun", "gpu")
def test_memory_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "device_type", lambda: "cuda")
    topology = detect_topology(TopologySettings(memory_fraction=0.5))
    assert topology.memory_bytes == FREE_BYTES // 2
    assert topology.compute_device == "cuda"
    assert used_and_available_bytes(RANK.device) == (TOTAL_BYTES - FREE_BYTES, FREE_BYTES)
    assert device_name(GPU) == NAME


def test_a_stopwatch_records_events(gpu: Gpu) -> None:
    watch = Stopwatch(GPU)
    watch.mark()
    for work_ms in (2.0, 3.0):
        gpu.queue(work_ms)
        watch.mark()
    after = watch.restarted()
    gpu.queue(0.5)
    after.mark()
    assert gpu.calls == ["synchronize", "event", "event", "event", "event"]  # no wait yet
    assert watch.intervals_ms() == [2.0, 3.0]
    assert after.intervals_ms() == [0.5]


def test_losses_are_read_after_the_device_has_them(on_gpu: Rank, gpu: Gpu) -> None:
    window = Window(10, on_gpu)
    for number in range(3):
        gpu.queue(4.0)
        window.add(torch.tensor(float(number)))
    gpu.calls.clear()
    closed = ClosedWindow(window)
    assert gpu.calls == ["event"]  # the host goes on
    assert closed.mean_losses().tolist() == [0.0, 1.0, 2.0]
    assert gpu.calls == ["event", "wait"]
    assert closed.step_ms() == [4.0, 4.0, 4.0]


def test_random_numbers_of_the_gpu_go_on(on_gpu: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.arange(16, dtype=torch.uint8)
    restored = Mock()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored)
    states = progress._generator_states(on_gpu)
    monkeypatch.setattr(progress, "_of_rank", lambda manifest, number, name: states.get(name))
    progress._restore_generators(Mock(), on_gpu)
    restored.assert_called_once_with(state, GPU)


def test_a_checkpoint_in_the_background_waits_for_its_copies(
    on_gpu: Rank, gpu: Gpu, tmp_path
) -> None:
    """The training changes the weights as soon as `save` returns."""
    saver = Saver(tmp_path, keep=1, background=True, rank=on_gpu)
    gpu.calls.clear()
    saver.save({"tables.t.weight": LogicalTensor.whole(torch.arange(6.0))}, run_state(1))
    assert "synchronize" in gpu.calls
    saver.close()


def test_what_torch_holds_is_reported_beside_its_tensors(
    on_gpu: Rank, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free blocks of its allocator are memory that the run took."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * GIB)
    assert peak_memory_gib(on_gpu) == (2.0, 3.0)
    used_gib, reserved_gib = peak_memory_gib(rank)
    assert used_gib > 0
    assert reserved_gib is None
