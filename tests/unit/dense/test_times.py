"""The dense part of a model is measured without tables, ranks or other changes than its own."""

import logging

import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from dlrm_sharded.dense import model as dense_model
from dlrm_sharded.dense import times as dense_times
from dlrm_sharded.dense.pooled_vectors import batch_without_ids
from dlrm_sharded.dense.times import MIN_ITERATIONS, measure_all_reduce, measure_dense
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.launch_clock import MAX_SLEEP_MS, LaunchClock
from tests.cuda import HOST_MS, Gpu, install_gpu

TABLES = (Table("a", 100, 8, 1.0), Table("b", 10**12, 16, 1.0))
OPTIMIZER = OptimizerConfig(
    embedding="rowwise_adagrad",
    embedding_learning_rate=0.1,
    dense="adagrad",
    dense_learning_rate=0.1,
)


def batch(num_samples: int = 16) -> Batch:
    return batch_without_ids(torch.randn(num_samples, 3), torch.zeros(num_samples))


def model(*, dense_graph: bool = False):
    layers = {"dense_layers": [32, 8], "over_layers": [16, 1]}
    return dlrm(TABLES, 3, **layers, device=torch.device("cpu"), dense_graph=dense_graph)


@pytest.mark.parametrize("dense_graph", [False, True])
def test_every_part_takes_time_and_tables_need_no_memory(dense_graph):
    """Table b alone would need 64 TB. In a graph, all parts would be one."""
    built = model(dense_graph=dense_graph)
    weight = next(built.over_arch.parameters())
    before = weight.detach().clone()
    times = measure_dense(built, TABLES, [batch()], OPTIMIZER, iterations=5, data_ms=7.0)
    parts = times.to_json()
    assert times.data_ms == 7.0
    layers = ("bottom_forward", "top_forward", "top_backward", "bottom_backward", "optimizer")
    assert all(parts[f"{layer}_ms"] > 0 for layer in layers)
    dense = [p for name, p in model().named_parameters() if "embedding_bags" not in name]
    assert times.gradient_bytes == sum(parameter.nbytes for parameter in dense)
    assert not torch.equal(weight, before)
    assert times.launch_ms == 0.0, "a CPU launches nothing"


class _Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return vectors


@pytest.mark.parametrize(("budget_s", "timed"), [(0.0, MIN_ITERATIONS), (1e9, 9)])
def test_a_budget_ends_the_measurement_early(budget_s, timed):
    built = model()
    counted = _Counted()
    built.inter_arch = torch.nn.Sequential(counted, built.inter_arch)
    measure_dense(built, TABLES, [batch()], OPTIMIZER, iterations=9, time_budget_s=budget_s)
    assert counted.calls == timed + 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU on which the dense part is timed, though torch computes it on the CPU."""
    gpu = Gpu()
    install_gpu(monkeypatch, gpu)
    on_gpu = LaunchClock(torch.device("cuda", 0))
    monkeypatch.setattr(dense_times, "LaunchClock", lambda device: on_gpu)
    return gpu


class _OfGpu(torch.nn.Module):
    """Layers that the host launches and the GPU computes."""

    def __init__(self, gpu: Gpu, *, launch_ms: float, device_ms: float) -> None:
        super().__init__()
        self.stage = gpu.stage(launch_ms, device_ms)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        self.stage()
        return vectors


@pytest.mark.parametrize(
    ("launch_ms", "is_exposed"), [(0.5, False), (5.0, False), (2 * MAX_SLEEP_MS, True)]
)
def test_parts_on_a_gpu_are_without_the_time_to_launch_them(gpu, caplog, launch_ms, is_exposed):
    built = model()
    layers = _OfGpu(gpu, launch_ms=launch_ms, device_ms=2.0)
    built.inter_arch = torch.nn.Sequential(layers, built.inter_arch)
    with caplog.at_level(logging.WARNING):
        times = measure_dense(built, TABLES, [batch()], OPTIMIZER, iterations=9)
    num_marks = 6  # parts of a step
    assert times.launch_ms == pytest.approx(launch_ms + num_marks * HOST_MS)
    assert ("contain host time" in caplog.text) == is_exposed
    if not is_exposed:
        assert times.top_forward_ms == pytest.approx(2.0)
        assert times.total_ms == pytest.approx(2.0), "the total is the device's"


def test_the_all_reduce_begins_when_all_devices_are_awake(gpu, monkeypatch):
    reduced = []

    def all_reduce(tensor: torch.Tensor) -> None:
        reduced.append(tensor.numel())
        gpu.stage(launch_ms=0.05, device_ms=0.5)()

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    found = measure_all_reduce(400, torch.device("cuda", 0), iterations=3, warmup=1)
    assert found == pytest.approx(0.5)
    assert reduced == [1, 100] * 4


@pytest.mark.parametrize(("device", "allowed"), [("cuda", True), ("cpu", False)])
def test_products_are_rounded_as_in_a_training_before_they_are_measured(
    monkeypatch, tf32, device, allowed
):
    tf32(False)
    seen = []
    monkeypatch.setattr(dense_model, "measure_dense", lambda *args, **limits: seen.append(tf32()))
    dense = dense_model.DenseModel(lambda *args, **keys: None, 3, OPTIMIZER, bf16=False)
    dense.measured(TABLES, [], torch.device(device))
    assert seen == [allowed]
