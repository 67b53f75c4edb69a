"""Tables in pieces: any placement of them is a plan, and ever smaller ones fit."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import ShardingPlan, ShardingTask, validate
from dlrm_sharded.plans.layouts import is_row_wise
from dlrm_sharded.plans.tables import NUM_REUSE_BINS
from dlrm_sharded.sharders.splitting import (
    BY_ROWS,
    LARGEST_PIECE,
    NUM_HALVINGS,
    Splitting,
    splittings,
)
from tests.unit.synthetic import packed_tasks, tables_of, task_of, with_memory

HISTOGRAM = (0.75, 0.25, *[0.0] * (NUM_REUSE_BINS - 2))


HOSTS = [(1, 1), (1, 2), (1, 3), (2, 2), (3, 2)]


def named_like_pieces(task: ShardingTask) -> ShardingTask:
    names = {table.name: f"0.{i}: 0" for i, table in enumerate(task.tables)}
    return task.with_values(name=names, reuse_histogram=dict.fromkeys(names, HISTOGRAM))


tasks = packed_tasks(st.floats(0.5, 4.0), rows=st.integers(1, 3000), hosts=HOSTS).map(
    named_like_pieces
)
"""From little memory to plenty, on one or more hosts."""


@st.composite
def any_splittings(draw: st.DrawFn) -> Splitting:
    task = draw(tasks)
    found = draw(st.integers(0, 2 * NUM_HALVINGS))
    return list(splittings(task))[: found + 1][-1]


def plan_of(splitting: Splitting, ranks: list[int]) -> ShardingPlan:
    return ShardingPlan(splitting.task.topology.world_size, splitting.shards(ranks))


def ample(task: ShardingTask) -> ShardingTask:
    return with_memory(task, 2**50)


@given(any_splittings(), st.data())
def test_any_placement_is_a_plan(splitting: Splitting, data: st.DataObject) -> None:
    """That TorchRec trains; and one that fits, where the pieces do."""
    task = splitting.task
    topology = task.topology
    rank = st.integers(0, topology.world_size - 1)
    ranks = data.draw(
        st.lists(rank, min_size=len(splitting.pieces), max_size=len(splitting.pieces))
    )
    plan = plan_of(splitting, ranks)

    validate(plan, ample(task))

    free = list(splitting.free_bytes)
    for piece, on_rank in zip(splitting.pieces, ranks, strict=True):
        free[on_rank] -= topology.table_bytes(piece)
    if min(free) >= 0:
        validate(plan, task)
    left = [
        memory - used
        for memory, used in zip(
            topology.rank_memory_bytes, plan.bytes_by_rank(topology), strict=True
        )
    ]
    # pieces that share a rank share the optimizer's state of their rows
    assert all(a <= b for a, b in zip(free, left, strict=True))
    if not topology.optimizer_bytes_per_row:
        assert free == left


@given(any_splittings())
def test_pieces_are_tables(splitting: Splitting) -> None:
    pieces = iter(splitting.pieces)
    for table, parts in zip(splitting.task.tables, splitting.num_pieces, strict=True):
        of_table = [next(pieces) for _ in range(parts)]
        widths = [piece.embedding_dim for piece in of_table]
        assert parts == BY_ROWS or sum(widths) == table.embedding_dim
        assert parts == BY_ROWS or max(widths) - min(widths) in (0, 4)
        for piece in of_table:
            as_table = {"name": table.name, "embedding_dim": table.embedding_dim}
            assert dataclasses.replace(piece, **as_table) == table
    assert next(pieces, None) is None
    if splitting.pieces:
        # refuses names that are not unique
        dataclasses.replace(splitting.task, tables=splitting.pieces)


@given(tasks)
def test_splittings_become_finer(task: ShardingTask) -> None:
    """Tables that fit a rank are whole at first; rows are split for want of any other way."""
    topology = task.topology
    most = max(topology.rank_memory_bytes)
    first, *finer = splittings(task)
    for table, parts in zip(task.tables, first.num_pieces, strict=True):
        of_four_columns = topology.shard_bytes(table.name, table.num_embeddings, 4)
        if topology.table_bytes(table) <= most:
            assert parts == 1
        elif of_four_columns <= most:
            assert parts > 1 or table.embedding_dim == 4
    assert len({splitting.num_pieces for splitting in (first, *finer)}) == 1 + len(finer)
    by_columns = [
        splitting
        for splitting in (first, *finer)
        if splitting.num_pieces.count(BY_ROWS) == first.num_pieces.count(BY_ROWS)
    ]
    for coarse, fine in itertools.pairwise(by_columns):
        assert all(a <= b for a, b in zip(coarse.num_pieces, fine.num_pieces, strict=True))
    last = (first, *finer)[-1]
    limit = LARGEST_PIECE * sum(topology.rank_memory_bytes) / topology.world_size
    for piece in last.pieces:
        size = topology.table_bytes(piece)
        # what is larger has too few rows for a block on each rank
        assert (
            size <= limit / 2**NUM_HALVINGS * (1 + 1e-9)
            or piece.num_embeddings <= topology.world_size**2
            or topology.world_size == 1
        )


def small_task(shapes: list[tuple[int, int]], memory: int, world_size: int = 2) -> ShardingTask:
    tables = tables_of(*((rows, cols, 1.0) for rows, cols in shapes))
    return task_of(tables, world_size, memory, 64, device="cuda")


def test_pieces_on_a_rank_are_one_shard() -> None:
    splitting = Splitting(small_task([(10, 20), (10, 4)], 10**6), (4, 1))
    assert [piece.embedding_dim for piece in splitting.pieces] == [8, 4, 4, 4, 4]
    shards = splitting.shards([1, 0, 1, 0, 1])
    assert [(s.table, s.rank, s.cols) for s in shards] == [
        ("t0", 0, (0, 8)),
        ("t0", 1, (8, 20)),
        ("t1", 1, (0, 4)),
    ]


def test_row_blocks_take_memory_of_every_rank() -> None:
    splitting = Splitting(small_task([(101, 4), (10, 8)], 5000), (BY_ROWS, 1))
    assert [piece.embedding_dim for piece in splitting.pieces] == [8]
    assert splitting.free_bytes == (5000 - 51 * 16, 5000 - 50 * 16)
    shards = splitting.shards([1])
    assert [(s.table, s.rank, s.rows) for s in shards] == [
        ("t0", 0, (0, 51)),
        ("t0", 1, (51, 101)),
        ("t1", 1, (0, 10)),
    ]
    assert all(is_row_wise([s], splitting.task.tables[0]) for s in shards[:2])
    assert min(Splitting(small_task([(101, 4)], 800), (BY_ROWS,)).free_bytes) < 0


@given(st.integers(1, 4), st.integers(1, 2048), st.integers(0, 3), st.data())
def test_no_shard_is_too_wide_for_a_gpu(
    world_size: int, steps: int, finer: int, data: st.DataObject
) -> None:
    """Wherever the pieces are placed, if one shard fits each of enough ranks."""
    width = 4 * min(steps, 512 * world_size)
    task = small_task([(50, width), (50, 16)], 10**9, world_size)
    splitting = list(splittings(task))[: finer + 1][-1]
    rank = st.integers(0, world_size - 1)
    num_pieces = len(splitting.pieces)
    ranks = data.draw(st.lists(rank, min_size=num_pieces, max_size=num_pieces))
    spread = splitting.spread(ranks)
    validate(plan_of(splitting, list(spread)), task)
    if width <= 2048:
        assert list(spread) == ranks


def test_pieces_move_only_where_there_is_memory() -> None:
    task = small_task([(100, 4096), (100, 16)], 100 * 4 * (2048 + 16))
    splitting = Splitting(task, (2, 1))
    assert splitting.spread([1, 1, 1]) == (1, 0, 1)
    assert splitting.spread([0, 1, 1]) == (0, 1, 1)
    small = with_memory(task, 100 * 4 * 2047, 10**9)
    assert Splitting(small, (2, 1)).spread([1, 1, 1]) is None


def test_splits_only_as_tables_may_be() -> None:
    """No rank has memory for the whole table."""
    task = small_task([(1000, 64)], memory=64_000, world_size=8)
    found = {}
    for layouts in ((), ("rows",), ("columns",)):
        of_table = splittings(task.with_values(layouts={"t0": frozenset(layouts)}))
        found[layouts] = {num for splitting in of_table for num in splitting.num_pieces}
    assert found[()] == {1}
    assert found["rows",] == {BY_ROWS}
    assert min(found["columns",]) > 1


def test_tables_in_fp16_are_split_as_those_of_half_the_size() -> None:
    task = small_task([(1000, 64), (500, 128)], memory=64_000, world_size=8)
    half = with_memory(task, 32_000).with_values(precision=dict.fromkeys(("t0", "t1"), "fp16"))
    found = [[splitting.num_pieces for splitting in splittings(one)] for one in (task, half)]
    assert found[0] == found[1]
