"""What a training does on a GPU: it reads late what the device computes, and copies in one go."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.tracing import recorder
from dlrm_sharded.tracing.recorder import TraceRecorder
from dlrm_sharded.tracing.regions import Event
from dlrm_sharded.training import progress
from dlrm_sharded.training.result import peak_gib
from dlrm_sharded.training.window import ClosedWindow, Window
from tests.cuda_stand_ins import GPU, Gpu
from tests.unit.checkpoint.cases import run_state


@pytest.fixture
def on_gpu(rank: Rank) -> Rank:
    """The only rank of a job, on a GPU; its group is of gloo all the same."""
    return dataclasses.replace(rank, device=GPU)


def test_losses_are_read_after_the_device_has_them(on_gpu: Rank, gpu: Gpu) -> None:
    window = Window(10, on_gpu)
    for number in range(3):
        gpu.queue(4.0)
        window.add(torch.tensor(float(number), device=GPU))
    gpu.calls.clear()
    closed = ClosedWindow(window)
    assert gpu.calls == ["event"]  # the host goes on
    assert closed.mean_losses().tolist() == [0.0, 1.0, 2.0]
    assert gpu.calls == ["event", "wait"]
    assert closed.step_ms() == [4.0, 4.0, 4.0]


def test_peak_memory_is_that_of_the_device(on_gpu: Rank, gpu: Gpu) -> None:
    gpu.peak_bytes = 3 * GIB
    assert peak_gib(on_gpu) == 3.0


def test_random_numbers_of_the_gpu_go_on(
    on_gpu: Rank, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = progress._generator_states(on_gpu)
    before = gpu.random_state
    gpu.random_state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(progress, "_of_rank", lambda manifest, number, name: states.get(name))
    manifest: Any = None
    progress._restore_generators(manifest, on_gpu)
    assert gpu.random_state.tolist() == before.tolist()


def test_a_checkpoint_in_the_background_waits_for_its_copies(
    on_gpu: Rank, gpu: Gpu, tmp_path
) -> None:
    """The training changes the weights as soon as `save` returns."""
    weights = torch.arange(6.0, device=GPU)
    saver = Saver(tmp_path, keep=1, background=True, rank=on_gpu)
    saver.save({"tables.t.weight": LogicalTensor.whole(weights)}, run_state(1))
    weights.zero_()
    saver.close()
    [path] = checkpoints(tmp_path)
    assert load_whole(read_manifest(path), "tables.t.weight").tolist() == [0, 1, 2, 3, 4, 5]


def kineto_event(name: str, begin_ns: int, **fields: Any) -> Any:
    """An event as torch's profiler has it, of the host unless it names a stream."""
    stream = fields.pop("stream", None)
    values = {
        "name": name,
        "start_ns": begin_ns,
        "duration_ns": 2_000_000,
        "device_type": DeviceType.CPU if stream is None else DeviceType.CUDA,
        "device_resource_id": stream,
        "correlation_id": 0,
        "linked_correlation_id": 0,
        "start_thread_id": 11,
        "sequence_nr": -1,
        "is_hidden_event": False,
        "is_user_annotation": False,
        **fields,
    }
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def test_kernels_are_linked_to_what_launched_them() -> None:
    """Of regions, the device has a copy; of launches, so has the host."""
    zero = 10**12
    raw = [
        kineto_event(recorder.ANCHOR, zero - 1_000_000),
        kineto_event("aten::mm", zero, correlation_id=5),
        kineto_event("cudaLaunchKernel", zero, correlation_id=6, linked_correlation_id=5),
        kineto_event("gemm", zero + 4_000_000, linked_correlation_id=5, stream=7),
        kineto_event("region", zero, stream=7, is_user_annotation=True),
    ]
    traced: Any = TraceRecorder(nn.Linear(1, 1), torch.device("cpu"))
    results = SimpleNamespace(events=lambda: raw)
    traced._profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    _, operator, kernel = traced._events()
    assert (operator.name, operator.stream, operator.launch) == ("aten::mm", None, None)
    assert kernel == Event("gemm", 4.0, 6.0, thread=11, stream=7, launch=(11, 0.0))


def test_a_trace_ends_when_the_device_is_done(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace without kernels is said to be one of the host."""
    traced = TraceRecorder(nn.Linear(1, 1), GPU)
    traced.stop()
    assert gpu.calls == ["synchronize"]
    found = [SimpleNamespace(stream=None)]
    monkeypatch.setattr(traced, "_events", lambda: found)
    monkeypatch.setattr(recorder, "reduce_events", lambda events: events)
    with caplog.at_level(logging.WARNING):
        assert traced.record() is found
    assert "the profiler has seen no kernels" in caplog.text
    caplog.clear()
    found.append(SimpleNamespace(stream=7))
    traced.record()
    assert not caplog.text
