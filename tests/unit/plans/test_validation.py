"""`validate` against counting cells: what it accepts covers every cell once, and fits."""

import itertools

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dlrm_sharded import InvalidPlanError, Shard, ShardingPlan, Table, validate
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, row_blocks
from dlrm_sharded.plans.table_optimizers import STATE_BYTES
from dlrm_sharded.plans.task import ShardingTask, Topology, with_optimizer
from tests.unit.synthetic import column_shards, task_of, with_memory


@st.composite
def tasks(draw: st.DrawFn) -> ShardingTask:
    hosts, per_host = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tables = tuple(
        Table(f"t{i}", draw(st.integers(1, 9)), 4 * draw(st.integers(1, 4)), 1.0)
        for i in range(draw(st.integers(1, 3)))
    )
    memory, size = st.integers(100, 2000), hosts * per_host
    ranks = {
        "local_world_size": per_host,
        "memory_bytes_by_rank": draw(st.none() | st.tuples(*[memory] * size)),
        "optimizer_bytes_per_row": draw(st.sampled_from([0, 4])),
    }
    return task_of(tables, size, draw(memory), batch_size=8, device="cuda", **ranks)


def column_edges(table: Table, most: int | None = None) -> st.SearchStrategy[list[int]]:
    """Ends of column shards, cut at any multiples of 4, at most so many times."""
    if table.embedding_dim == 4:
        return st.just([0, 4])
    cuts = st.sets(st.sampled_from(range(4, table.embedding_dim, 4)), max_size=most)
    return cuts.map(lambda cuts: [0, *sorted(cuts), table.embedding_dim])


@st.composite
def shards_of(draw: st.DrawFn, table: Table, topology: Topology) -> list[Shard]:
    """A proper split of a table more often than not, and then perhaps one thing wrong with it."""
    rows, cols = (0, table.num_embeddings), (0, table.embedding_dim)
    ranks = st.integers(0, topology.world_size - 1)
    if draw(st.booleans()):
        edges = draw(column_edges(table))
        shards = [Shard(table.name, draw(ranks), rows, part) for part in itertools.pairwise(edges)]
    else:
        over = draw(st.sampled_from([topology.world_size, topology.ranks_per_host]))
        first = draw(st.integers(0, topology.world_size - over))
        blocks = row_blocks(table.num_embeddings, over)
        shards = [Shard(table.name, first + i, block, cols) for i, block in enumerate(blocks)]
    if draw(st.integers(0, 2)) == 0:
        wrong = draw(st.integers(0, len(shards) - 1))
        bound = st.integers(-1, 17)
        shards[wrong] = draw(
            st.builds(
                Shard,
                st.sampled_from([table.name, "unknown"]),
                st.integers(-1, topology.world_size),
                st.tuples(bound, bound),
                st.tuples(bound, bound),
            )
        )
    return shards


@st.composite
def tasks_with_plans(draw: st.DrawFn) -> tuple[ShardingTask, ShardingPlan]:
    task = draw(tasks())
    shards = [s for table in task.tables for s in draw(shards_of(table, task.topology))]
    return task, ShardingPlan(task.topology.world_size, tuple(shards))


@given(tasks_with_plans())
def test_accepts_only_exact_tilings_that_fit(drawn: tuple[ShardingTask, ShardingPlan]) -> None:
    task, plan = drawn
    try:
        validate(plan, task)
    except InvalidPlanError as error:
        event("refused")
        assert str(error)
        return
    event("accepted")
    for table in task.tables:
        covered = np.zeros((table.num_embeddings, table.embedding_dim), dtype=int)
        for shard in plan.shards:
            if shard.table == table.name:
                covered[slice(*shard.rows), slice(*shard.cols)] += 1
        assert (covered == 1).all()
    by_rank = task.topology.memory_bytes_by_rank
    for rank, used in enumerate(plan.bytes_by_rank(task.topology)):
        assert used <= (by_rank[rank] if by_rank else task.topology.memory_bytes)
    assert ShardingPlan.from_json(plan.to_json()) == plan


@given(tasks(), st.data())
def test_refuses_no_proper_column_split(task: ShardingTask, data: st.DataObject) -> None:
    """Columns cut anywhere at multiples of 4, each part on a rank of its own, fit ample memory."""
    ample, shards = with_memory(task, 10**9), []
    world_size = ample.topology.world_size
    for table in ample.tables:
        edges = data.draw(column_edges(table, most=world_size - 1))
        shards += [
            Shard(table.name, rank, (0, table.num_embeddings), part)
            for rank, part in enumerate(itertools.pairwise(edges))
        ]
    validate(ShardingPlan(world_size, tuple(shards)), ample)


def test_refuses_shards_too_wide_for_a_gpu() -> None:
    table = Table("wide", 100, 4096, 1.0)

    def check(device: str, *shards: Shard) -> None:
        validate(ShardingPlan(2, shards), task_of([table], device=device))

    halves = column_shards(table, (0, 2048), (1, 2048))
    uneven = column_shards(table, (0, 2052), (1, 2044))
    blocks = RowBlocks(range(2)).shards(table)
    check("cuda", *halves)
    for shards in ([Shard.whole(table, 0)], uneven, blocks):
        check("cpu", *shards)
        with pytest.raises(InvalidPlanError, match=r"columns, and FBGEMM .* 2,048 .* on cuda"):
            check("cuda", *shards)


@pytest.mark.parametrize("optimizer", [*STATE_BYTES])
def test_replicas_need_an_optimizer_that_trains_them(optimizer: str) -> None:
    tables = (Table("a", 50, 8, 1.0), Table("b", 40, 8, 1.0))
    task = with_optimizer(task_of(tables, device="cuda"), optimizer)
    plan = ShardingPlan(2, (*Replicas(2).shards(tables[0]), Shard.whole(tables[1], 1)))
    if task.can_replicate:
        validate(plan, task)
        return
    with pytest.raises(InvalidPlanError, match=r"'a' is replicated.*'adam', under which no table"):
        validate(plan, task)
