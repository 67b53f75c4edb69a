"""Greedy placement: what it balances, and that it packs whatever a size-first packer packs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import ConfigError, InfeasibleTaskError, Sharder, ShardingTask, Table, validate
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder, RandomSharder
from tests.unit.synthetic import packed_tasks, tables_of, task_of, with_memory


def sharders(seed: int = 0) -> list[Sharder]:
    return [RandomSharder(seed=seed), *(GreedySharder(weight, seed=seed) for weight in WEIGHTS)]


def packs_size_first(task: ShardingTask) -> bool:
    """An own, plain packer: largest table first, to the emptiest, fullest or first rank it fits."""
    topology = task.topology
    sizes = sorted((topology.table_bytes(t) for t in task.tables), reverse=True)
    for pick in (max, min, lambda fitting, key: fitting[0]):
        free = list(topology.memory_bytes_by_rank or [topology.memory_bytes] * topology.world_size)
        for size in sizes:
            fitting = [rank for rank in range(topology.world_size) if free[rank] >= size]
            if not fitting:
                break
            free[pick(fitting, key=free.__getitem__)] -= size
        else:
            return True
    return False


@given(packed_tasks(st.floats(0.2, 2.5), most_tables=12), st.integers(0, 5))
def test_valid_plan_or_clear_error(task: ShardingTask, seed: int) -> None:
    for sharder in sharders(seed):
        try:
            plan = sharder.shard(task)
        except InfeasibleTaskError as error:
            assert not packs_size_first(task)
            if task.table_bytes > sum(task.topology.rank_memory_bytes):
                assert str(error).startswith("no plan can fit: the tables need")
                continue
            assert "table 't" in str(error)
            assert "freest" in str(error)
            assert "sharder=search" in str(error)
        else:
            validate(plan, task)
            assert len(plan.shards) == len(task.tables)


def loads(weight: str, task: ShardingTask) -> list[float]:
    by_name = {table.name: table for table in task.tables}
    load = [0.0] * task.topology.world_size
    for shard in GreedySharder(weight).shard(task).shards:
        load[shard.rank] += WEIGHTS[weight](by_name[shard.table])
    return load


@pytest.mark.parametrize("weight", WEIGHTS)
def test_balances_its_weight(weight: str) -> None:
    """Within 4/3 of the best partition (Graham's bound for longest-first)."""
    tables = tables_of(*((50 + 37 * i, 4 * (1 + i % 5), 1.0 + 3 * i % 7) for i in range(9)))
    task = task_of(tables, batch_size=64)
    weights = [WEIGHTS[weight](table) for table in tables]
    best = min(
        max(sum(chosen), sum(weights) - sum(chosen))
        for n in range(10)
        for chosen in itertools.combinations(weights, n)
    )
    assert max(loads(weight, task)) <= 4 / 3 * best


def test_random_depends_on_seed() -> None:
    task = task_of(tables_of(*[(8, 4, 1.0)] * 20), 4)
    assert len({RandomSharder(seed=seed).shard(task).shards for seed in range(5)}) == 5


def test_table_larger_than_any_rank() -> None:
    task = task_of([Table("big", 1000, 64, 1.0)], 4, 100_000)
    message = r"'big' needs 256,000 B, more than the 100,000"
    for sharder in sharders():
        with pytest.raises(InfeasibleTaskError, match=message):
            sharder.shard(task)


@pytest.mark.parametrize(
    ("num_rows", "by_rank"),
    [((4, 8, 5, 3), (9, 11)), ((3, 7, 5), (8, 7)), ((6, 4, 6, 5), (14, 9))],
    ids=["most_free", "tightest", "first_fit"],
)
def test_each_packer_is_needed(num_rows: tuple[int, ...], by_rank: tuple[int, ...]) -> None:
    """Memory is full or nearly; of all orders that `dim` tries, one packer's alone fits."""
    tables = tables_of(*((rows, 4, 1.0) for rows in num_rows))
    task = with_memory(task_of(tables), *(16 * rows for rows in by_rank))
    for sharder in sharders():
        validate(sharder.shard(task), task)


def test_says_which_rank_is_freest() -> None:
    """By memory left, not by memory used."""
    for shapes, message in (
        ([(100, 16, 1.0)], r"than the 5,000 B of the largest rank \(rank 1 is freest\)"),
        ([(100, 12, 1.0), (100, 8, 1.0)], r"'t1' .* freest rank \(2\) has 2,000 B left of 2,000 B"),
    ):
        task = with_memory(task_of(tables_of(*shapes), 3), 1000, 5000, 2000)
        with pytest.raises(InfeasibleTaskError, match=message):
            GreedySharder("size").shard(task)


def test_unknown_weight() -> None:
    with pytest.raises(ConfigError, match="known: size, dim, lookup, size_lookup"):
        GreedySharder("dims")
