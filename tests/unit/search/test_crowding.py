"""The search where the widest shard of a rank slows down all others, as on a GPU."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import SearchSharder, SharderContext, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.features import DEVICE_WORK
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.plan import ShardingPlan, whole_tables
from dlrm_sharded.search.problem import Load
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import state_shards
from tests.unit.cost.worked_bound import constant_prices
from tests.unit.made_up import task_of
from tests.unit.search.made_up import COST_ALONE, model_of, predicted, problem_of

IDS_MS, COLUMNS_MS, WIDEST_MS = 0.001, 0.001, 0.01
"""Prices of a thousand ids: in themselves, for each 16 columns, for each warp of the widest."""


def gpu_model() -> LearnedCostModel:
    """Lookups dominate, and the widest shard dominates lookups."""
    prices = {"ids": IDS_MS, "id_columns": COLUMNS_MS}
    net = constant_prices(prices, DEVICE_WORK["cuda"], launch_ms=0.02, next_launch_ms=0.01)
    model = model_of("warps")
    compute = dataclasses.replace(
        model.compute, forward=net, backward=net, widest_ms=np.full((2, 2), WIDEST_MS)
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
        plan = whole_tables(task, [rank_of[table.name] for table in task.tables])
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
    assert lower_bound_ms(model.price(task)) <= cost_ms * (1 + 1e-9)
    assert cost_ms <= separated_ms(task, model)


def test_costs_kept_while_editing_are_those_predicted() -> None:
    """Also after the widest piece of a rank has come and gone, many times."""
    task, model = mixed_task(3, 3, 3, 6), model_of("warps")
    problem = problem_of(task, model, critical_path_share=0.5)
    state, rng = State(problem), np.random.default_rng(0)
    for unit in range(problem.num_units):
        state.set_width(unit, int(rng.integers(3)), int(problem.num_steps[unit]))
    for _ in range(200):
        unit, rank = int(rng.integers(problem.num_units)), int(rng.integers(3))
        for held in list(state.widths[unit]):
            state.set_width(unit, held, 0)
        state.set_width(unit, rank, int(problem.num_steps[unit]))
        if rng.random() < 0.3:
            state.refresh()
    state.refresh()
    cost = model.price(task).predict(ShardingPlan(3, state_shards(state)))
    stages = [(rank.fwd_compute_ms, rank.bwd_compute_ms) for rank in cost.per_rank]
    kept = state.load[:, Load.COMPUTE] / 0.5  # half of the objective is the critical path
    np.testing.assert_allclose(kept, stages, rtol=1e-9)
