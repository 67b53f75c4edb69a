"""The dense part of a model is measured without tables, ranks or other changes than its own."""

import pytest
import torch
from torchrec.datasets.utils import Batch

from dlrm_sharded.dense.pooled_vectors import batch_without_ids
from dlrm_sharded.dense.times import MIN_ITERATIONS, measure_dense
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.tables import Table

TABLES = (Table("a", 100, 8, 1.0), Table("b", 10**12, 16, 1.0))
OPTIMIZER = OptimizerConfig(
    embedding="rowwise_adagrad",
    embedding_learning_rate=0.1,
    dense="adagrad",
    dense_learning_rate=0.1,
)


def batch(num_samples: int = 16) -> Batch:
    return batch_without_ids(torch.randn(num_samples, 3), torch.zeros(num_samples))


def model():
    device = torch.device("cpu")
    return dlrm(TABLES, 3, dense_layers=[32, 8], over_layers=[16, 1], device=device)


def test_every_part_takes_time_and_tables_need_no_memory():
    """Table b alone would need 64 TB."""
    built = model()
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
