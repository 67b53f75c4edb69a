"""A state's books: the same whatever way led to it, and what the cost model predicts.

Letters: W ranks.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import Constraints, Shard, ShardingPlan, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.state_shards import load_plan
from tests.unit.cost.plans import tables, topologies
from tests.unit.made_up import task_of
from tests.unit.search.made_up import (
    MODELS,
    model_of,
    predicted,
    problem_of,
    random_plan,
    roomy_task,
)
from tests.unit.search.states import assert_same_books

HOSTS = [(1, 1), (1, 2), (1, 5), (2, 4), (4, 1), (4, 2)]
"""Hosts, ranks on each."""

TOTALS = {"cost_ms": 0.0, "critical_path_ms": 1.0}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Of a few tables, some of them together or apart."""
    topology = draw(topologies())
    drawn = tuple(draw(tables(f"t{i}")) for i in range(draw(st.integers(1, 5))))
    task = ShardingTask(drawn, topology, draw(st.sampled_from([64, 8192])))
    names = [table.name for table in drawn]
    constraints = draw(
        st.sampled_from(
            [Constraints(), Constraints(unsplit=names[:1])]
            + [Constraints(apart=[names[:2], names[1:]])] * (len(names) > 1)
            + [Constraints(together=[names[:2]])] * (len(names) > 1)
        )
    )
    return problem_of(
        task,
        model_of(draw(st.sampled_from(MODELS))),
        constraints,
        critical_path_share=draw(st.sampled_from([0.0, 0.05, 1.0])),
        split_error=draw(st.sampled_from([0.0, 0.1])),
    )


def change(state: State, kind: int, unit: int, rank: int, width: int) -> None:
    """Some change, from any three numbers."""
    problem = state.problem
    unit %= problem.num_units
    if kind and state.group[unit] == COLUMNS:
        state.set_width(unit, rank % problem.world_size, width % (int(problem.num_steps[unit]) + 1))
        return
    for held in list(state.widths[unit]):
        state.set_width(unit, held, 0)
    groups = [COLUMNS]
    groups += [b.groups[rank % len(b.groups)] for b in problem.blocks if b.possible[unit]]
    state.set_group(unit, groups[width % len(groups)])


changes = st.lists(
    st.tuples(*[st.integers(0, 3)] * 2, st.integers(0, 11), st.integers(0, 70)), max_size=25
)


def again(state: State) -> State:
    """A new state with the same pieces."""
    new = State(state.problem)
    for unit, widths in enumerate(state.widths):
        new.set_group(unit, int(state.group[unit]))
        for rank, width in widths.items():
            new.set_width(unit, rank, width)
    new.refresh()
    return new


@given(problem=problems(), some=changes, more=changes)
def test_books_do_not_depend_on_the_way(
    problem: Problem, some: list[tuple[int, ...]], more: list[tuple[int, ...]]
) -> None:
    state = State(problem)
    for step in some:
        change(state, *step)
        state.refresh()
    assert_same_books(state, again(state))

    before, mark = again(state), len(state.log)
    for step in more:
        change(state, *step)
    state.refresh()
    assert_same_books(state, again(state))
    state.undo(mark)
    assert len(state.log) == mark
    assert_same_books(state, before)

    state.undo()
    assert_same_books(state, State(problem))
    assert state.log == []


def loaded(shards: tuple[Shard, ...], problem: Problem) -> State:
    state = State(problem)
    assert load_plan(state, ShardingPlan(problem.world_size, shards).shards_by_table())
    return state


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: f"{hosts[0]}x{hosts[1]}")
def test_memory_is_that_of_the_plan(hosts: tuple[int, int]) -> None:
    """Or more, where the last row block is smaller: it is counted like the others."""
    rng = np.random.default_rng(hosts)
    for _ in range(20):
        task = roomy_task(rng, hosts, int(rng.integers(1, 12)))
        plan = ShardingPlan(task.topology.world_size, random_plan(rng, task))
        state = loaded(plan.shards, problem_of(task, model_of("shipped")))
        used = task.topology.memory_bytes - state.free_bytes
        exact = np.array(plan.bytes_by_rank(task.topology))
        assert (used >= exact).all()
        whole = {table.name: table.num_embeddings for table in task.tables}
        if all(shard.num_rows == whole[shard.table] for shard in plan.shards):
            assert (used == exact).all()
        else:
            # a block less one row for each of the others, at the most
            row_bytes = sum(
                task.topology.shard_bytes(t.name, 1, t.embedding_dim) for t in task.tables
            )
            assert (used - exact <= row_bytes * plan.world_size).all()


def off(shards: tuple[Shard, ...], task: ShardingTask, name: str, seed: int, total: str) -> float:
    """The objective over what is predicted, less 1."""
    model = model_of(name, seed)
    state = loaded(shards, problem_of(task, model, critical_path_share=TOTALS[total]))
    return state.objective_ms / getattr(predicted(shards, task, model), total) - 1.0


@pytest.mark.parametrize("name", MODELS)
def test_the_cost_of_a_balanced_plan_tells_what_a_rank_processes(name: str) -> None:
    tables = [Table(f"t{i}", 1000, 16, 10.0) for i in range(4)]
    problem = problem_of(with_profiles(task_of(tables, 4)), model_of(name))
    state = loaded(tuple(Shard.whole(table, i) for i, table in enumerate(tables)), problem)
    processing_ms = float(problem.processing_ms(state.load[0]))
    found_ms = problem.mean_processing_ms(state.objective_ms)
    assert found_ms == pytest.approx(processing_ms, rel=1e-9)


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("kind", ["rows", "host_rows"])
def test_row_blocks_cost_what_is_predicted(kind: str, total: str) -> None:
    """On all ranks, and on those of every host in turn, beside columns of even volumes or alone."""
    rng = np.random.default_rng(8)
    for seed in range(6):
        task = roomy_task(rng, (2, 3), 8)
        tables = tuple(
            dataclasses.replace(table, embedding_dim=12, num_embeddings=6 * table.num_embeddings)
            for table in task.tables
        )
        shards = [Shard.whole(table, i) for i, table in enumerate(tables[:6])]
        for host, table in enumerate(tables[6:]):
            ranks = range(6) if kind == "rows" else range(3 * host, 3 * host + 3)
            shards += RowBlocks(ranks).shards(table)
        task = dataclasses.replace(task, tables=tables)
        for name in MODELS:
            assert off(tuple(shards), task, name, seed, total) == pytest.approx(0.0, abs=1e-7)
        if kind == "rows":
            alone = dataclasses.replace(task, tables=tables[6:])
            of_rows = tuple(shards[6:])
            assert off(of_rows, alone, "plain", seed, total) == pytest.approx(0.0, abs=1e-7)
