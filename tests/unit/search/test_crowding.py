"""The search where the widest shard of a rank slows down all others, as on a GPU."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import SearchSharder, SharderContext, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.features import DEVICE_WORK
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.widest import WidestShard
from dlrm_sharded.plans.plan import ShardingPlan
from tests.unit.cost.worked_bound import constant_net
from tests.unit.search.synthetic import COST_ALONE, model_of, predicted
from tests.unit.synthetic import task_of

IDS_MS, COLUMNS_MS, WIDEST_MS = 0.001, 0.001, 0.01
"""Costs of a thousand ids: in themselves, for each 16 columns, for each warp of the widest."""


def gpu_model() -> LearnedCostModel:
    """Lookups dominate, and the widest shard dominates lookups."""
    costs = {"ids": IDS_MS, "id_columns": COLUMNS_MS}
    net = constant_net(costs, DEVICE_WORK["cuda"], launch_ms=0.02, next_launch_ms=0.01)
    model = model_of("warps")
    compute = dataclasses.replace(
        model.compute, forward=net, backward=net, crowding=WidestShard(np.full((2, 2), WIDEST_MS))
    )
    communication = dataclasses.replace(
        model.communication,
        exchange=1e-4 * model.communication.exchange,
        reduce=0.1 + model.communication.reduce,
    )
    return dataclasses.replace(model, compute=compute, communication=communication, device="cuda")


def mixed_task(seed: int, world_size: int, num_wide: int, num_narrow: int) -> ShardingTask:
    rng = np.random.default_rng(seed)
    wide = [Table(f"w{i}", 10**5, 128, rng.uniform(1, 3)) for i in range(num_wide)]
    narrow = [Table(f"n{i}", 10**5, 16, rng.uniform(1, 10)) for i in range(num_narrow)]
    task = task_of((*wide, *narrow), world_size, 10**12, 8192, device="cuda")
    return with_profiles(task)


def separated_ms(task: ShardingTask, model: LearnedCostModel) -> float:
    """Least cost of plans with wide tables on the first ranks alone, both kinds balanced by ids."""
    costs = []
    for num_wide in range(1, task.topology.world_size):
        load, rank_of = np.zeros(task.topology.world_size), {}
        for table in sorted(task.tables, key=lambda table: -table.pooling_factor):
            ranks = slice(0, num_wide) if table.embedding_dim > 32 else slice(num_wide, None)
            rank = int(load[ranks].argmin()) + ranks.start
            load[rank] += table.pooling_factor
            rank_of[table.name] = rank
        plan = ShardingPlan.from_ranks(task, [rank_of[table.name] for table in task.tables])
        costs.append(predicted(plan.shards, task, model).cost_ms)
    return min(costs)


@pytest.mark.parametrize(
    ("seed", "world_size", "num_wide", "num_narrow"), [(0, 4, 4, 30), (1, 3, 6, 20), (2, 2, 3, 20)]
)
def test_separates_narrow_tables_from_wide_ones(
    seed: int, world_size: int, num_wide: int, num_narrow: int
) -> None:
    task, model = mixed_task(seed, world_size, num_wide, num_narrow), gpu_model()
    sharder = SearchSharder(
        SharderContext(cost_model=model), time_budget_s=1e6, patience=3, **COST_ALONE
    )
    cost_ms = predicted(sharder.shard(task).shards, task, model).cost_ms
    assert lower_bound_ms(model.cost_task(task)) <= cost_ms * (1 + 1e-9)
    assert cost_ms <= separated_ms(task, model)
