"""The lower bound: below every plan there is, and what it does not depend on."""

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import Shard, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.communication import CommunicationModel
from dlrm_sharded.cost.learned import LearnedCostModel
from tests.unit.cost.plans import Planned, planned
from tests.unit.search.synthetic import (
    MODELS,
    all_plans,
    model_of,
    predicted,
    tiny_task,
    unlimited_task,
    with_memory,
)
from tests.unit.synthetic import column_shards, tables_of, task_of

TINY = {
    "2_or_3_ranks": {"num_tables": 2},
    "2x2": {"num_tables": 2, "hosts": (2, 2), "full": 0.3},
    "3x1": {"num_tables": 2, "hosts": (3, 1), "full": 0.3},
    "nearly_full": {"num_tables": 3, "full": 0.95},
    "sequence": {"num_tables": 2, "sequences": (0,), "modules": "ab"},
    "sequences_2x2": {
        "num_tables": 2,
        "hosts": (2, 2),
        "full": 0.3,
        "sequences": (0, 1),
        "modules": "ab",
    },
    "modules": {"num_tables": 2, "modules": "ab"},
}
ROUNDING, HALVINGS = 1e-9, 1e-5
"""The largest T is found to about 2 ** -20 of it, from below."""


@functools.cache
def plans_of(shape: str, seed: int) -> tuple[ShardingTask, list[tuple[Shard, ...]]]:
    task = tiny_task(seed, **TINY[shape])
    return task, list(all_plans(task))


def assert_below(
    model: LearnedCostModel, task: ShardingTask, plans: Iterable[tuple[Shard, ...]]
) -> None:
    """Check that no plan costs less than the bound."""
    bound_ms = lower_bound_ms(model.cost_task(task))
    costs = (predicted(shards, task, model).cost_ms for shards in plans)
    assert bound_ms <= min(costs, default=math.inf) * (1 + ROUNDING)


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_of_a_tiny_task_is_cheaper(name: str, shape: str) -> None:
    for seed in range(3):
        assert_below(model_of(name, seed), *plans_of(shape, seed))


@pytest.mark.parametrize("name", MODELS)
def test_exact_where_there_is_one_plan(name: str) -> None:
    for seed in range(5):
        task = unlimited_task(np.random.default_rng(seed), (1, 1), 1)
        narrow = dataclasses.replace(task.tables[0], embedding_dim=4)
        task = dataclasses.replace(task, tables=(narrow,))
        cost_ms = predicted((Shard.whole(task.tables[0], 0),), task, model_of(name, seed)).cost_ms
        bound_ms = lower_bound_ms(model_of(name, seed).cost_task(task))
        assert cost_ms * (1 - HALVINGS) <= bound_ms <= cost_ms * (1 + ROUNDING)


@given(of=planned(), name=st.sampled_from(MODELS), seed=st.integers(0, 3))
def test_no_plan_is_cheaper(of: Planned, name: str, seed: int) -> None:
    assert_below(model_of(name, seed), of[1], [of[0].shards])


def test_pieces_of_one_table_on_one_rank() -> None:
    """Valid at equal widths, and no cheaper than one piece."""
    table = Table("t0", 5000, 16, 9.0)
    task = with_profiles(task_of((table,)))
    shards = column_shards(table, (0, 4), (1, 4), (0, 4), (1, 4))
    for name in MODELS:
        assert_below(model_of(name), task, [tuple(shards)])


@pytest.mark.parametrize("fixed_ms", [0.0, 5.0, 50.0])
def test_a_reduction_on_one_host_is_paid_there_alone(fixed_ms: float) -> None:
    """The dominating table `b` cannot be split, and need not be on the host that reduces `a`."""
    exchanges = model_of("plain").communication
    reduce = 0.01 * exchanges.reduce
    reduce[:, 0] = fixed_ms
    model = dataclasses.replace(
        model_of("plain"), communication=CommunicationModel(0.01 * exchanges.exchange, reduce)
    )
    tables = (Table("a", 1000, 4, 0.01), Table("b", 1, 4, 200.0))
    task = with_profiles(task_of(tables, 4, 10_000, 2048, local_world_size=2))
    assert_below(model, task, all_plans(task))


def test_a_rank_may_wait_for_nothing() -> None:
    """The rank that has everything gets nothing from others, and so waits for none."""
    task = with_profiles(task_of((Table("a", 10, 4, 5.0),), batch_size=2048))
    for seed in range(20):
        assert_below(model_of("receiving", seed), task, all_plans(task))


@pytest.mark.parametrize(
    ("shapes", "needed_bytes"),
    [
        ([(1000, 8, 3.0)], 250 * 8 * 4),
        ([(3, 8, 3.0)], 3 * 4 * 4),  # too few rows for blocks on all ranks, enough for a host's
        ([(100, 4, 1.0)] * 9, 100 * 4 * 4 * 9 // 4),  # fits no four ranks together
    ],
    ids=["one", "few_rows", "all"],
)
@pytest.mark.parametrize("name", MODELS)
def test_infinite_where_surely_none_fits(
    name: str, shapes: list[tuple[int, int, float]], needed_bytes: int
) -> None:
    task = with_profiles(task_of(tables_of(*shapes), 4, batch_size=512, local_world_size=2))
    cost_task = model_of(name).cost_task
    assert lower_bound_ms(cost_task(with_memory(task, needed_bytes))) < math.inf
    assert lower_bound_ms(cost_task(with_memory(task, needed_bytes - 1))) == math.inf


@pytest.mark.parametrize("name", ["plain", "warps"])
def test_sequences_without_ids_cost_what_they_launch(name: str) -> None:
    """Nothing is exchanged then, and nothing is divided by that."""
    tables = [Table("none", 100, 8, 0.0, pooled=False), Table("a", 100, 8, 3.0)]
    task = with_profiles(task_of(tables, 2, batch_size=512))
    plan = tuple(Shard.whole(table, rank) for rank, table in enumerate(task.tables))
    assert_below(model_of(name), task, [plan])
    assert lower_bound_ms(model_of(name).cost_task(task)) > 0.0
