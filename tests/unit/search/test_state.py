"""A state's books: the same whatever way led to it, and what the cost model predicts.

Letters: W ranks.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded import Constraints, Shard, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.state_shards import load_plan
from tests.unit.cost.plans import tables, topologies
from tests.unit.search.states import assert_same_books
from tests.unit.search.synthetic import MODELS, model_of, problem_of
from tests.unit.synthetic import task_of


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


@pytest.mark.parametrize("name", MODELS)
def test_the_cost_of_a_balanced_plan_is_what_a_rank_processes(name: str) -> None:
    tables = [Table(f"t{i}", 1000, 16, 10.0) for i in range(4)]
    problem = problem_of(with_profiles(task_of(tables, 4)), model_of(name))
    state = State(problem)
    assert load_plan(state, {table.name: [Shard.whole(table, i)] for i, table in enumerate(tables)})
    processing_ms = float(problem.processing_ms(state.load[0]))
    found_ms = problem.mean_processing_ms(state.objective_ms)
    assert found_ms == pytest.approx(processing_ms, rel=1e-9)
