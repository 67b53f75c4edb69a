"""Greedy placement: what it balances, and that it packs whatever a size-first packer packs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.plan import validate
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder, RandomSharder
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology


def sharders(seed: int = 0) -> list[Sharder]:
    return [RandomSharder(seed=seed), *(GreedySharder(weight, seed=seed) for weight in WEIGHTS)]


tables_strategy = st.lists(
    st.tuples(
        st.integers(1, 5000), st.integers(1, 32).map(lambda n: 4 * n), st.floats(0, 100, width=32)
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def tasks(draw: st.DrawFn) -> ShardingTask:
    """Memory from far too little to plenty, most often just about enough."""
    tables = tuple(Table(f"t{i}", *shape) for i, shape in enumerate(draw(tables_strategy)))
    world_size = draw(st.integers(1, 5))
    state = draw(st.sampled_from([0, 4]))
    total = sum(t.num_embeddings * (4 * t.embedding_dim + state) for t in tables)
    memory = max(1, int(total / world_size * draw(st.floats(0.7, 2.5))))
    return ShardingTask(
        tables, Topology(world_size, memory, optimizer_bytes_per_row=state), batch_size=64
    )


def packs_size_first(task: ShardingTask) -> bool:
    """An own, plain packer: largest table first, to the emptiest, fullest or first rank it fits."""
    topology = task.topology
    sizes = sorted((topology.table_bytes(t) for t in task.tables), reverse=True)
    for pick in (min, max, lambda fitting: fitting[0]):
        used = [[0, r] for r in range(topology.world_size)]
        for size in sizes:
            fitting = [rank for rank in used if rank[0] + size <= topology.memory_bytes]
            if not fitting:
                break
            pick(fitting)[0] += size
        else:
            return True
    return False


@given(tasks(), st.integers(0, 5))
@settings(max_examples=2500, deadline=None)
def test_valid_plan_or_clear_error(task: ShardingTask, seed: int) -> None:
    for sharder in sharders(seed):
        try:
            plan = sharder.shard(task)
        except InfeasibleTaskError as error:
            assert not packs_size_first(task)
            assert "table 't" in str(error)
            assert "freest" in str(error)
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
    tables = tuple(Table(f"t{i}", 50 + 37 * i, 4 * (1 + i % 5), 1.0 + 3 * i % 7) for i in range(9))
    task = ShardingTask(tables, Topology(2, 10**9), 64)
    weights = [WEIGHTS[weight](table) for table in tables]
    best = min(
        max(sum(chosen), sum(weights) - sum(chosen))
        for n in range(10)
        for chosen in itertools.combinations(weights, n)
    )
    assert max(loads(weight, task)) <= 4 / 3 * best


def test_seed_decides_ties_only() -> None:
    equal = ShardingTask(tuple(Table(f"t{i}", 8, 4, 1.0) for i in range(8)), Topology(2, 10**6), 8)
    plans = {GreedySharder("dim", seed=seed).shard(equal).shards for seed in range(5)}
    assert len(plans) > 1
    different = ShardingTask(
        tuple(Table(f"t{i}", 8, 4 + 4 * i, 1.0) for i in range(8)), Topology(2, 10**6), 8
    )
    assert len({GreedySharder("dim", seed=s).shard(different).shards for s in range(5)}) == 1


def test_random_depends_on_seed() -> None:
    task = ShardingTask(tuple(Table(f"t{i}", 8, 4, 1.0) for i in range(20)), Topology(4, 10**6), 8)
    assert len({RandomSharder(seed=seed).shard(task).shards for seed in range(5)}) == 5


def test_table_larger_than_any_rank() -> None:
    task = ShardingTask((Table("big", 1000, 64, 1.0),), Topology(4, 1000), 8)
    for sharder in sharders():
        with pytest.raises(
            InfeasibleTaskError, match=r"'big' needs 256,000 B, more than the 1,000"
        ):
            sharder.shard(task)


def test_unknown_weight() -> None:
    with pytest.raises(ConfigError, match="known: size, dim, lookup, size_lookup"):
        GreedySharder("dims")
