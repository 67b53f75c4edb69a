"""Descents and searches: never worse than their start, always whole, and over in time."""

import numpy as np
import pytest

from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.search import find_plan
from dlrm_sharded.search.cuts import cut_units
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.find_plan import find_state
from dlrm_sharded.search.first_plan import first_plan
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import State
from dlrm_sharded.search.stopping import StoppingRule
from tests.unit.search.states import (
    CountingClock,
    assert_same_books,
    is_whole,
    state_of_whole_units,
)
from tests.unit.search.synthetic import (
    model_of,
    problem_of,
    searched_problem,
    unlimited_task,
    with_memory,
)
from tests.unit.synthetic import tables_of, task_of

MAX_REFRESHES = 20
"""Exact evaluations of the state after a look at the clock; a few milliseconds of small tasks."""


def found(
    problem: Problem,
    *,
    patience: int = 10**6,
    seed: int = 0,
    good_gap: float = 0.0,
    clock: CountingClock | None = None,
) -> State:
    """Search, and check that there is a complete plan."""
    bound_ms = lower_bound_ms(problem.costed)
    stopping = StoppingRule(clock or CountingClock(), bound_ms * (1 + good_gap), patience)
    state = find_state(problem, bound_ms, seed, stopping)
    assert is_whole(state)
    return state


@pytest.mark.parametrize("seed", range(4))
def test_searches_are_no_worse_than_their_start(seed: int) -> None:
    problem = searched_problem(seed, full=0.8)
    plain = problem.without_margin()
    costs = [found(problem, patience=patience).copy_for(plain).objective_ms for patience in (0, 5)]
    bound_ms = lower_bound_ms(problem.costed)
    start = first_plan(problem, cut_units(problem, problem.mean_processing_ms(bound_ms)))
    assert costs[0] <= start.copy_for(plain).objective_ms * 1.05  # margins differ
    assert costs[1] <= costs[0] * 1.02


def test_rebuilds_end_with_the_best_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on from costlier ones, here from all and without descents, and come back."""
    monkeypatch.setattr(find_plan, "DEVIATION", 10.0)
    descend = Descent.run
    monkeypatch.setattr(Descent, "run", lambda self, **_: None)
    for seed in range(4):
        problem = searched_problem(seed, full=0.8)
        state = first_plan(problem, cut_units(problem, 0.0))
        rng, clock = np.random.default_rng(seed), CountingClock()
        descend(Descent(state, rng, clock))
        before_ms = state.objective_ms
        state = find_plan.walk(state, rng, StoppingRule(clock, 0.0, 10))
        assert is_whole(state)
        assert state.objective_ms <= before_ms * (1 + 1e-9)


@pytest.mark.parametrize("looks", [0, 1, 2, 5, 20, 60, 200])
def test_over_at_the_first_look_that_says_so(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan, however little time there was; every loop looks once more, and leaves."""
    clock = CountingClock(looks)
    refreshes_at_look = [0]
    is_over, refresh = CountingClock.is_over.fget, State.refresh

    def counted_look(self: CountingClock) -> bool:
        refreshes_at_look.append(0)
        return bool(is_over(self))

    def counted_refresh(self: State) -> None:
        refreshes_at_look[-1] += 1
        refresh(self)

    monkeypatch.setattr(CountingClock, "is_over", property(counted_look))
    monkeypatch.setattr(State, "refresh", counted_refresh)
    found(searched_problem(4, full=0.7), clock=clock)
    assert looks < clock.asked <= looks + 16
    assert max(refreshes_at_look[:-1]) <= MAX_REFRESHES


def test_ends_where_the_bound_is_near() -> None:
    problem = searched_problem(4)
    near, far = CountingClock(), CountingClock()
    found(problem, patience=10, good_gap=1e9, clock=near)
    found(problem, patience=10, good_gap=0.0, clock=far)
    assert near.asked < 200 < far.asked


def test_nothing_that_fits() -> None:
    task = with_memory(unlimited_task(np.random.default_rng(0), (1, 2), 3), 64)
    problem = problem_of(task, model_of("shipped"))
    assert find_state(problem, 1.0, 0, StoppingRule(CountingClock(), 0.0, 10)) is None


@pytest.mark.parametrize("seed", range(2))
def test_other_seeds_are_other_searches_of_the_same_quality(seed: int) -> None:
    problem = searched_problem(6, full=0.7)
    first, again, other = (
        found(problem, patience=8, seed=s).objective_ms for s in (seed, seed, seed + 1)
    )
    assert first == again
    assert other == pytest.approx(first, rel=0.1)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_descents_end_lower_and_whole(seed: int, splits: bool) -> None:
    problem = searched_problem(seed)
    state = state_of_whole_units(problem)
    before, start = state.objective_ms, state.copy_for(problem)
    num_pieces = sum(map(len, state.widths))
    Descent(state, np.random.default_rng(0), CountingClock(), splits=splits).run()
    assert state.objective_ms <= before * 1.01  # what falls is a stand-in
    assert is_whole(state)
    assert splits or sum(map(len, state.widths)) <= num_pieces
    assert_same_books(state, state.copy_for(problem))
    state.undo()
    assert_same_books(state, start)


def test_columns_move_between_pieces_though_nothing_is_cut() -> None:
    task = task_of(tables_of((500, 32, 9.0)), 2)
    state = State(problem_of(task, model_of("plain")))
    for rank, width in enumerate((2, 6)):
        state.set_width(0, rank, width)
    state.refresh()
    Descent(state, np.random.default_rng(0), CountingClock(), splits=False).run()
    assert state.widths == [{0: 4, 1: 4}]
