"""Tables without a measured profile cost the expectation over the skews that they may have."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.accesses.profiles import SKEWS, with_expected_profile
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.learned import learned_cost_model
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology

COMPUTE = learned_cost_model(RunContext(device="cpu")).compute
UNKNOWN = tuple(
    Table(f"t{i}", rows, cols, pooling)
    for i, (rows, cols, pooling) in enumerate(
        [(100, 4, 0.5), (40_000, 16, 30.0), (3_000_000, 64, 8.0), (40_000_000, 128, 1.0)]
    )
)
KNOWN = Table("known", 1000, 16, 2.0, (1.0, *(0.0,) * 16))
TASK = ShardingTask((KNOWN, *UNKNOWN), Topology(1, 2**40, compute_device="cpu"), 8192)


def whole_ms(tables: tuple[Table, ...], compute: ComputeModel) -> np.ndarray:
    task = dataclasses.replace(TASK, tables=tables)
    plan = ShardingPlan(1, tuple(Shard.whole(table, 0) for table in tables))
    return compute.stand_alone_ms(compute.vectors(workload_of_plan(plan, task)))


def test_a_table_costs_the_mean_over_the_skews() -> None:
    by_skew = [
        whole_ms(with_expected_profile(UNKNOWN, batch_size=8192, exponent=exponent), COMPUTE)
        for exponent in SKEWS
    ]

    known, *assumed = with_expected_profiles(TASK, COMPUTE).tables

    assert known == KNOWN
    expected = np.array(list(SKEWS.values())) @ np.array(by_skew)
    assert whole_ms(tuple(assumed), COMPUTE) == pytest.approx(expected, rel=5e-3)
    for table in assumed:
        assert table.reuse_histogram is not None
        assert sum(table.reuse_histogram) == pytest.approx(1.0)


def test_what_is_known_stays() -> None:
    profiled = with_expected_profiles(TASK, COMPUTE)
    assert with_expected_profiles(profiled, COMPUTE) is profiled


def test_a_table_that_no_sample_uses() -> None:
    task = dataclasses.replace(TASK, tables=(Table("unused", 10, 4, 0.0),))
    (table,) = with_expected_profiles(task, COMPUTE).tables
    assert table.reuse_histogram == (0.0,) * 17


def test_the_weights_are_a_distribution_from_uniform_accesses_on() -> None:
    assert sum(SKEWS.values()) == pytest.approx(1.0)
    assert list(SKEWS) == sorted(SKEWS)
    assert min(SKEWS) == 0.0
