"""NVIDIA's planners: the published plans, and what TorchRec's layouts change in them."""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from dlrm_sharded import ConfigError, InfeasibleTaskError, Shard, Sharder, ShardingPlan, validate
from dlrm_sharded.plans.layouts import is_replicated, is_row_wise, layout_name
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.sharders.baselines.halving import METHODS, HalvingSharder
from dlrm_sharded.testing import check_sharder
from tests.unit.made_up import mlperf_task, tables_of, task_of

HUGECTR, EMBARK = (partial(HalvingSharder, method) for method in METHODS)
PLANNERS = pytest.mark.parametrize("planner", [HUGECTR, EMBARK], ids=METHODS)


def on_gpus(
    *shapes: tuple[int, int, float], world_size: int = 4, gib: float = 1.0, **ranks: int
) -> ShardingTask:
    """A task of tables with these rows, columns and ids."""
    tables, memory = tables_of(*shapes), int(gib * GIB)
    return task_of(tables, world_size, memory, 64 * world_size, device="cuda", **ranks)


def ids_per_rank(plan: ShardingPlan, task: ShardingTask, exchange_ids: float) -> list[float]:
    """The load by which HugeCTR's planner judges a plan: ids, and the price of each shard."""
    tables, load = {table.name: table for table in task.tables}, np.zeros(plan.world_size)
    for shard in plan.shards:
        table = tables[shard.table]
        share = shard.num_rows * shard.num_cols / table.num_embeddings / table.embedding_dim
        load[shard.rank] += 0 if shard.replicated else table.pooling_factor * share + exchange_ids
    return list(load)


def split_tables(plan: ShardingPlan) -> dict[str, list[Shard]]:
    by_table = plan.shards_by_table().items()
    return {n: shards for n, shards in by_table if len(shards) > 1 and not is_replicated(shards)}


def test_nvidias_plan_for_one_host() -> None:
    """The published code replicates 13 tables, quarters one, and gives no rank more than 29."""
    task = mlperf_task(8, 60)
    plan = HUGECTR().shard(task)
    validate(plan, task)
    assert len(plan.replicated_tables) == 13
    ((name, shards),) = split_tables(plan).items()
    assert (name, [shard.num_cols for shard in shards]) == ("cat_20", [32] * 4)
    load = ids_per_rank(plan, task, exchange_ids=7 / 4)
    assert (max(load), min(load)) == (29.0, 26.25)


def test_nvidias_plan_for_two_hosts() -> None:
    """The published code splits no table over both hosts, whose loads are 202.75 and 206."""
    task = mlperf_task(16, 60)
    plan = HUGECTR(strategy="hier_auto").shard(task)
    validate(plan, task)
    assert len(plan.replicated_tables) == 13
    for shards in split_tables(plan).values():
        assert len(shards) == 8
        assert len({shard.rank // 8 for shard in shards}) == 1
    num_shards = dict.fromkeys(range(16), 0)
    for shard in plan.shards:
        num_shards[shard.rank] += not shard.replicated
    load = np.array(ids_per_rank(plan, task, exchange_ids=0.0)).reshape(2, 8).sum(axis=1)
    exchanges = np.array([num_shards[0], num_shards[8]]) * 67 / 4
    np.testing.assert_allclose(sorted(load + exchanges), [202.75, 206.0])


def test_nvidias_plan_of_ranks_on_two_hosts() -> None:
    """The published code quarters one table and halves another, and has a load of 41.75."""
    task = mlperf_task(16, 60)
    plan = HUGECTR().shard(task)
    split = {name: len(shards) for name, shards in split_tables(plan).items()}
    assert split == {"cat_20": 4, "cat_21": 2}
    assert max(ids_per_rank(plan, task, exchange_ids=67 / 4)) == 41.75


def columns_per_rank(plan: ShardingPlan, task: ShardingTask, exchange_ids: float) -> list[float]:
    """The load by which EMBark's planner judges a plan: columns read and exchanged."""
    tables, load = {table.name: table for table in task.tables}, np.zeros(plan.world_size)
    for shard in plan.shards:
        table = tables[shard.table]
        num_ids = table.pooling_factor * shard.num_rows / table.num_embeddings
        load[shard.rank] += 0 if shard.replicated else shard.num_cols * (num_ids + exchange_ids)
    return list(load)


@pytest.mark.parametrize(
    ("world_size", "exchange_ids", "published"),
    [(8, 7 / 4, (29.0, 29.25)), (16, 60 / 4, (40.0, 32.5))],
    ids=["w8", "w16"],
)
def test_embark_is_near_the_published_code(
    world_size: int, exchange_ids: float, published: tuple[float, float]
) -> None:
    """Within 2 % of the better one of its plans, by rows alone and by columns, too."""
    task = mlperf_task(world_size, 60)
    plan = EMBARK().shard(task)
    assert len(plan.replicated_tables) == 13
    assert max(columns_per_rank(plan, task, exchange_ids)) / 128 <= 1.02 * min(published)


@PLANNERS
@pytest.mark.parametrize("strategy", ["auto", "hier_auto"])
@pytest.mark.parametrize(
    ("world_size", "local_world_size"),
    [(1, 1), (2, 2), (2, 1), (3, 3), (8, 4), (8, 8), (64, 8), (6, 3)],
)
def test_world_sizes(
    planner: Callable[..., Sharder], strategy: str, world_size: int, local_world_size: int
) -> None:
    shapes = [(1000, 16, 3.0), (50, 128, 90.0), (3, 4, 0.0), (200_000, 64, 20.5), (700, 768, 2.0)]
    ranks = {"world_size": world_size, "local_world_size": local_world_size}
    task = on_gpus(*shapes, **ranks)
    for replicate in (True, False):
        plan = check_sharder(lambda r=replicate: planner(strategy=strategy, replicate=r), task)
        assert (plan is None) == (strategy == "hier_auto" and world_size == local_world_size)
        if plan is not None:
            small = {"t0", "t1", "t2", "t4"} if replicate and world_size > 1 else set()
            assert {*plan.replicated_tables} == small


@PLANNERS
def test_places_the_next_table_on_the_least_loaded_rank(planner: Callable[..., Sharder]) -> None:
    """Best possible: 9 + 1, 5 + 4 and 6 + 3 ids on three ranks."""
    ids = (9.0, 6.0, 5.0, 4.0, 3.0, 1.0)
    task = on_gpus(*((1000, 16, num) for num in ids), world_size=3)
    plan = planner(replicate=False, exchange_ids=0.5, num_placements=1).shard(task)
    by_rank: dict[int, list[float]] = {rank: [] for rank in range(3)}
    for shard in plan.shards:
        by_rank[shard.rank].append(ids[int(shard.table[1:])])
    assert sorted(by_rank.values()) == [[5.0, 4.0], [6.0, 3.0], [9.0, 1.0]]


@PLANNERS
@pytest.mark.parametrize(
    ("width", "min_partition", "expected"),
    [(128, 32, [32] * 4), (128, 64, [128] * 4), (64, 16, [16] * 4), (16, 32, [16] * 4)],
)
def test_halves_columns_then_splits_rows(
    planner: Callable[..., Sharder], width: int, min_partition: int, expected: list[int]
) -> None:
    task = on_gpus((1000, width, 100.0))
    sharder = planner(replicate=False, min_partition=min_partition)
    shards = sharder.shard(task).shards
    assert [shard.num_cols for shard in shards] == expected
    assert is_row_wise(shards, task.tables[0]) == (expected[0] == width)


def test_rows_are_split_on_one_host_first() -> None:
    shapes = [(1000, 16, 100.0), *[(1000, 16, 25.0)] * 4]
    task = on_gpus(*shapes, world_size=8, local_world_size=4)
    plan = HUGECTR(replicate=False, exchange_ids=1.0).shard(task)
    (split,) = split_tables(plan).values()
    assert {shard.rank // 4 for shard in split} in ({0}, {1})
    assert max(ids_per_rank(plan, task, exchange_ids=1.0)) == 26.0


def test_a_dear_exchange_keeps_tables_whole() -> None:
    task = on_gpus(*((1000, 128, ids) for ids in (40.0, 10.0, 10.0, 10.0)))
    assert split_tables(HUGECTR(replicate=False, exchange_ids=0.1).shard(task))
    assert not split_tables(HUGECTR(replicate=False, exchange_ids=1e3).shard(task))


def test_embark_counts_columns_and_hugectr_does_not() -> None:
    """A wide table with few ids is the busiest one for EMBark only, and lies alone."""
    shapes = [(1000, 256, 2.0), (1000, 16, 3.0), *[(1000, 16, 1.0)] * 2]
    task = on_gpus(*shapes, world_size=2)
    with_wide = []
    for planner in (HUGECTR, EMBARK):
        sharder = planner(replicate=False, exchange_ids=10.0, num_placements=1)
        shards = sharder.shard(task).shards_by_table()
        (wide,) = shards["t0"]
        with_wide.append(sum(shard.rank == wide.rank for (shard,) in shards.values()))
    assert with_wide == [2, 1]


@PLANNERS
def test_small_is_below_the_limit(planner: Callable[..., Sharder]) -> None:
    """The limit counts 8 B for a weight, whatever the optimizer."""
    weights = int(0.5 * GIB / 8) // 64
    task = on_gpus((weights, 64, 1.0), (weights - 1, 64, 1.0), (weights + 1, 64, 1.0), gib=4)
    assert planner(replicate_below_gib=0.5).shard(task).replicated_tables == ("t1",)
    assert planner(replicate_below_gib=0).shard(task).replicated_tables == ()


@PLANNERS
def test_gives_up_the_larger_replicas_where_memory_is_short(planner: Callable[..., Sharder]):
    """Four replicas take 3 x 4,800 + 1,200 B and two 2 x 2,400 B, with their gradients."""
    task = task_of(tables_of(*((rows, 4, 1.0) for rows in (25, 100, 100, 100))), 2, 8000, 128)
    plan = planner().shard(task)
    validate(plan, task)
    assert {*plan.replicated_tables} == {"t0", "t1"}


@PLANNERS
def test_a_table_that_fits_no_rank_is_split(planner: Callable[..., Sharder]) -> None:
    task = mlperf_task(8, memory_gib=14)
    plan = planner().shard(task)
    validate(plan, task)
    assert {"cat_0", "cat_20"} <= set(split_tables(plan))


@PLANNERS
def test_says_why_there_is_no_plan(planner: Callable[..., Sharder]) -> None:
    with pytest.raises(InfeasibleTaskError, match=r"no plan can fit: the tables need 10[45],"):
        planner().shard(mlperf_task(8, memory_gib=10))


@PLANNERS
def test_one_host_has_no_other_hosts(planner: Callable[..., Sharder]) -> None:
    with pytest.raises(InfeasibleTaskError, match=r"all 8 ranks are on one; use sharder\.strat"):
        planner(strategy="hier_auto").shard(mlperf_task(8, 60))


@PLANNERS
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "uniform"),
        ("replicate_below_gib", -0.1),
        ("replicate_below_gib", "small"),
        ("replicate", "no"),
        ("exchange_ids", -1.0),
        ("exchange_ids", float("nan")),
        ("num_placements", 0),
        ("min_partition", 3),
        ("min_partition", 32.0),
    ],
)
def test_bad_options(planner: Callable[..., Sharder], key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^sharder\.{key} is [^\n]+$"):
        planner(**{key: value})


def test_unknown_method() -> None:
    with pytest.raises(ConfigError, match=r"^sharder\.method is 'dlrm'; known: hugectr, embark$"):
        HalvingSharder("dlrm")


@pytest.mark.parametrize("layouts", [(), ("columns",), ("rows",), ("host_rows",)], ids=str)
def test_splits_only_as_tables_may_be(layouts: tuple[str, ...]) -> None:
    """One table is much busier than all others together."""
    task = on_gpus((1000, 64, 501.0), *[(1000, 64, 1.0)] * 3, local_world_size=2)
    restricted = {table.name: frozenset(layouts) for table in task.tables}
    task = dataclasses.replace(task, batch_size=4096).with_values(layouts=restricted)
    plan = HalvingSharder("hugectr").shard(task)
    found = {layout_name(plan.shards_by_table()["t0"], task.tables[0], task.topology)}
    assert found == ({*layouts} or {None})
