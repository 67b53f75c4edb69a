"""From plans to states and back, and how much of a table moves between two plans."""

import dataclasses
import itertools

import numpy as np
import pytest

from dlrm_sharded import Constraints, Shard, ShardingPlan, ShardingTask, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.state_shards import load_plan, moved_bytes, state_shards
from tests.unit.search.synthetic import (
    model_of,
    problem_of,
    random_plan,
    unlimited_task,
    with_memory,
)
from tests.unit.synthetic import column_shards, tables_of, task_of

HOSTS = [(1, 1), (1, 3), (2, 2), (4, 1), (2, 4)]
Layout = tuple[tuple[int, int], ...]
"""Rank and columns of the shards of a table of 16 columns."""


def by_table(shards: tuple[Shard, ...]) -> dict[str, list[Shard]]:
    return ShardingPlan(2**20, shards).shards_by_table()


def sizes(shards: tuple[Shard, ...]) -> list[tuple[str, int, int, int]]:
    return sorted((s.table, s.rank, s.num_rows, s.num_cols) for s in shards)


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: f"{hosts[0]}x{hosts[1]}")
def test_there_and_back(hosts: tuple[int, int]) -> None:
    """In the memory of the plan, or more where the last row block is smaller: it counts as any."""
    rng = np.random.default_rng(hosts)
    for _ in range(30):
        task = unlimited_task(rng, hosts, int(rng.integers(1, 9)))
        shards = random_plan(rng, task)
        state = State(problem_of(task, model_of("shipped")))
        assert load_plan(state, by_table(shards))
        plan = ShardingPlan(task.topology.world_size, shards)
        exact = np.array(plan.bytes_by_rank(task.topology))
        counted = task.topology.memory_bytes - state.free_bytes - exact
        rows = {table.name: table.num_embeddings for table in task.tables}
        row_bytes = [task.topology.shard_bytes(t.name, 1, t.embedding_dim) for t in task.tables]
        has_blocks = any(shard.num_rows < rows[shard.table] for shard in shards)
        assert (counted >= 0).all()
        assert (counted <= has_blocks * sum(row_bytes) * plan.world_size).all()
        assert sorted(state_shards(state, by_table(shards))) == sorted(shards)
        new = state_shards(state)
        validate(ShardingPlan(task.topology.world_size, new), task)
        assert sizes(new) == sizes(shards)


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: f"{hosts[0]}x{hosts[1]}")
def test_moved_bytes_are_those_of_new_cells(hosts: tuple[int, int]) -> None:
    rng = np.random.default_rng(hosts)
    for _ in range(30):
        task = unlimited_task(rng, hosts, 3)
        shape = {"num_embeddings": 24, "embedding_dim": 20}
        small = tuple(dataclasses.replace(table, **shape) for table in task.tables)
        task = dataclasses.replace(task, tables=small)
        before, after = (by_table(random_plan(rng, task)) for _ in range(2))
        for table, (precision, num_bytes) in zip(small, itertools.cycle(TABLE_BYTES.items())):
            cells = np.zeros((2, task.topology.world_size, 24, 20), dtype=bool)
            for held, shards in zip(cells, (before, after), strict=True):
                for shard in shards[table.name]:
                    held[shard.rank, slice(*shard.rows), slice(*shard.cols)] = True
            new = int((cells[1] & ~cells[0]).sum())
            there = [dataclasses.replace(s, precision=precision) for s in after[table.name]]
            assert moved_bytes(task, before[table.name], there) == num_bytes * new


def even_task(num_tables: int = 2, *, columns: int = 16) -> ShardingTask:
    tables = tables_of(*[(100, columns, 2.0)] * num_tables)
    return with_profiles(task_of(tables, 4, 10**9, 256, local_world_size=2))


def laid_out(*layouts: Layout) -> tuple[Shard, ...]:
    tables = tables_of(*[(100, 16, 2.0)] * len(layouts))
    shards = (column_shards(table, *pieces) for table, pieces in zip(tables, layouts, strict=True))
    return tuple(itertools.chain.from_iterable(shards))


WHOLE: Layout = ((1, 16),)
SPLIT: Layout = ((3, 4), (0, 12))
TWICE: Layout = ((1, 8), (1, 8))
OF_HOST = tuple(Shard("t1", rank, rows, (0, 16)) for rank, rows in ((2, (0, 50)), (3, (50, 100))))


@pytest.mark.parametrize(
    ("constraints", "shards", "kept"),
    [
        (Constraints(), laid_out(SPLIT, TWICE), True),
        (Constraints(), laid_out(SPLIT) + OF_HOST, True),
        (Constraints(pin={"t0": [0, 3]}), laid_out(SPLIT, WHOLE), True),
        (Constraints(pin={"t0": [0, 2]}), laid_out(SPLIT, WHOLE), False),
        (Constraints(pin={"t1": [2, 3]}), laid_out(WHOLE) + OF_HOST, True),
        (Constraints(pin={"t1": [1, 2]}), laid_out(WHOLE) + OF_HOST, False),
        (Constraints(unsplit=["t0"]), laid_out(WHOLE, SPLIT), True),
        (Constraints(unsplit=["t0"]), laid_out(SPLIT, WHOLE), False),
        (Constraints(unsplit=["t0"]), laid_out(TWICE, WHOLE), False),
        (Constraints(unsplit=["t1"]), laid_out(WHOLE) + OF_HOST, False),
        (Constraints(together=[["t0", "t1"]]), laid_out(WHOLE, WHOLE), True),
        (Constraints(together=[["t0", "t1"]]), laid_out(WHOLE, ((2, 16),)), False),
        (Constraints(together=[["t0", "t1"]]), laid_out(WHOLE, TWICE), False),
        (Constraints(apart=[["t0", "t1"]]), laid_out(SPLIT, WHOLE), True),
        (Constraints(apart=[["t0", "t1"]]), laid_out(SPLIT, ((0, 16),)), False),
        (Constraints(apart=[["t0", "t1"]]), laid_out(WHOLE) + OF_HOST, False),
    ],
    ids=lambda value: None if isinstance(value, bool | tuple) else repr(value)[12:60],
)
def test_takes_only_what_keeps_the_constraints(
    constraints: Constraints, shards: tuple[Shard, ...], kept: bool
) -> None:
    state = State(problem_of(even_task(), model_of("shipped"), constraints))
    assert load_plan(state, by_table(shards)) == kept
    if kept:
        assert sorted(state_shards(state, by_table(shards))) == sorted(shards)
        assert state.log == []


def test_takes_only_what_fits() -> None:
    task, shards = even_task(), by_table(laid_out(WHOLE, WHOLE))
    both = 2 * 100 * 16 * 4
    for memory, fits in ((both, True), (both - 1, False)):
        problem = problem_of(with_memory(task, memory), model_of("shipped"))
        assert load_plan(State(problem), shards) == fits


def test_columns_stay_where_they_were() -> None:
    """Of a table that lies otherwise, as far as that cuts no more."""
    earlier = by_table(laid_out(SPLIT, WHOLE))
    state = State(problem_of(even_task(), model_of("shipped")))
    assert load_plan(state, earlier)
    state.set_width(0, 0, 2)  # from rank 0, which had columns 4 to 16
    state.set_width(0, 2, 1)
    new = by_table(state_shards(state, earlier))
    assert [(s.rank, s.cols) for s in new["t0"]] == [(3, (0, 4)), (0, (4, 12)), (2, (12, 16))]
    assert new["t1"] == earlier["t1"]
    assert (state.group == COLUMNS).all()


def test_wide_tables_stay_where_they_were() -> None:
    """Though the search counts the columns of tables of more than 256 by eights."""
    earlier = by_table(laid_out(((0, 148), (2, 152)), ((1, 300),)))
    state = State(problem_of(even_task(columns=300), model_of("shipped")))
    assert load_plan(state, earlier)
    assert by_table(state_shards(state, earlier)) == earlier
    state.set_width(1, 1, 20)
    state.set_width(1, 3, 18)
    new = by_table(state_shards(state, earlier))
    assert new["t0"] == earlier["t0"]
    assert [(s.rank, s.cols) for s in new["t1"]] == [(1, (0, 160)), (3, (160, 300))]
