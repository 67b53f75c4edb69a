"""The study of groups: their share of samples and hosts, and the averages between them."""

import argparse
import math

import pytest

from benchmarks.groups import (
    CONTIGUOUS,
    INTERLEAVED,
    ROOM,
    average_ms,
    cases,
    report,
    steps_for,
    task_of_group,
    task_of_model,
)
from dlrm_sharded.cost.exchange_curves import ADAPTER_SHARE
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.plan import Shard, ShardingPlan

SPEC = gpu_specs()["h100_sxm"]


@pytest.mark.parametrize(
    ("size", "placement", "ranks_per_host"),
    [
        (8, CONTIGUOUS, 8),
        (16, CONTIGUOUS, 8),
        (8, INTERLEAVED, 1),
        (16, INTERLEAVED, 2),
        (32, INTERLEAVED, 4),
    ],
)
def test_a_group_has_all_tables_and_its_share_of_the_samples(
    size: int, placement: str, ranks_per_host: int
) -> None:
    task = task_of_model("mlperf", 64, SPEC)
    group = task_of_group(task, size, placement)

    assert group.tables == task.tables
    assert group.batch_size * 64 == task.batch_size * size
    assert group.topology.world_size == size
    assert group.topology.ranks_per_host == ranks_per_host
    mean_bytes = task.table_bytes / size
    assert mean_bytes < group.topology.memory_bytes <= ROOM * mean_bytes


def test_averages_take_the_bytes_of_the_fullest_rank_over_its_links() -> None:
    """An all-reduce sends 2 (N - 1) / N of the bytes: through an adapter, or by NVLink."""
    task = task_of_model("mlperf", 64, SPEC)
    num_rows, num_cols = 10_000_000, 128
    plan = ShardingPlan(
        16,
        (
            Shard("a", 0, (0, num_rows), (0, num_cols)),
            Shard("b", 1, (0, num_rows // 2), (0, num_cols)),
        ),
    )
    num_bytes = num_rows * (4 * num_cols + task.topology.optimizer_bytes_per_row)
    assert SPEC.adapter_gb_per_s is not None
    adapters_ms = 1.5 * num_bytes / (ADAPTER_SHARE * SPEC.adapter_gb_per_s * 1e6)

    contiguous_ms = average_ms(plan, task, 16, CONTIGUOUS, SPEC)
    interleaved_ms = average_ms(plan, task, 16, INTERLEAVED, SPEC)

    assert contiguous_ms == pytest.approx(adapters_ms, rel=0.01)
    assert interleaved_ms < contiguous_ms / 3


def test_a_group_is_worth_it_from_a_number_of_steps() -> None:
    assert steps_for(0.05, 2.0, 0.9, 99.5) == 100
    assert (0.9 + 99.5 / 100) / 2.0 < 0.95 < (0.9 + 99.5 / 99) / 2.0
    assert steps_for(0.05, 2.0, 1.95, 100.0) == math.inf


def test_the_report_compares_groups_with_one_plan() -> None:
    one = {"model": "mlperf", "num_gpus": 16}
    rows = [
        one | {"size": 16, "placement": None, "cost_ms": 2.2, "bound_ms": 2.0},
        one | {"size": 8, "placement": CONTIGUOUS, "cost_ms": 0.9, "average_ms": 99.5},
        one | {"size": 8, "placement": INTERLEAVED, "cost_ms": None, "error": "no room"},
    ]

    lines = report(rows, None).splitlines()

    assert lines[2] == "| mlperf | 16 | all ranks | 16 | 2.20 | 2.00 | - | - | - | - | - |"
    assert lines[3] == "| mlperf | 16 | contiguous | 8 | 0.90 | - | 100 | -4,920 | 5 | 55 | 100 |"
    assert lines[4] == "| mlperf | 16 | interleaved | 8 | - | - | - | - | - | - | - |"


def test_a_case_has_one_plan_and_those_of_groups() -> None:
    options = argparse.Namespace(models=["mlperf"], ranks=[16], gpu="h100_sxm", time_budget_s=0.5)

    (case,) = cases(options)
    all_ranks, contiguous, interleaved = case.run()

    assert (all_ranks["size"], all_ranks["average_ms"]) == (16, 0.0)
    assert all_ranks["bound_ms"] <= all_ranks["cost_ms"]
    assert contiguous["cost_ms"] < all_ranks["cost_ms"]
    assert contiguous["average_ms"] > interleaved["average_ms"] > 10 * all_ranks["cost_ms"]
