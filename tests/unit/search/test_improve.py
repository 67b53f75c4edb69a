"""Descents and searches: never worse, always whole, and over when the clock says so."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.search.construct import Cut, construct, cut_all
from dlrm_sharded.search.improve import Improver
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.search import Effort, search
from dlrm_sharded.search.state import COLUMNS, State
from tests.unit.search.made_up import MODELS, model_of, problem_of, roomy_task, with_memory
from tests.unit.search.test_construct import is_whole
from tests.unit.search.test_state import assert_same_books

HOSTS = [(1, 1), (1, 4), (2, 2), (4, 1), (3, 3)]
CHANGES_BETWEEN_LOOKS = 20
"""Exact evaluations of the state after a look at the clock; a few milliseconds of small tasks."""


class FakeClock:
    """Over after so many looks; counts how often it is asked, and what happens in between."""

    def __init__(self, looks: int = 10**9) -> None:
        self.looks = looks
        self.asked = 0
        self.refreshed = 0
        self.most_refreshed = 0

    @property
    def is_over(self) -> bool:
        self.asked += 1
        self.most_refreshed = max(self.most_refreshed, self.refreshed)
        self.refreshed = 0
        return self.asked > self.looks


def problem(seed: int, *, full: float = 0.5, share: float = 0.05) -> Problem:
    rng = np.random.default_rng(seed)
    task = roomy_task(rng, HOSTS[seed % len(HOSTS)], int(rng.integers(2, 16)))
    task = with_memory(task, int(task.table_bytes / task.topology.world_size / full) + 64)
    model = model_of(MODELS[seed % len(MODELS)], seed)
    return problem_of(task, model, critical_path_share=share, split_error=0.05)


def first_state(of: Problem) -> State:
    whole = [Cut(COLUMNS, (int(steps),)) for steps in of.num_steps]
    state = construct(of, whole)
    assert state is not None
    return state


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("seed", range(15))
def test_descents_end_lower_and_whole(seed: int, splits: bool) -> None:
    of = problem(seed)
    state = first_state(of)
    before, start = state.objective_ms, state.copy_for(of)
    num_pieces = sum(map(len, state.widths))
    Improver(state, np.random.default_rng(0), FakeClock(), splits=splits).descend()
    assert state.objective_ms <= before * 1.01  # what falls is a stand-in
    assert is_whole(state)
    assert splits or sum(map(len, state.widths)) <= num_pieces
    assert_same_books(state, state.copy_for(of))
    state.undo()
    assert_same_books(state, start)


def test_descents_pay() -> None:
    gains = []
    for seed in range(15):
        state = first_state(problem(seed))
        before = state.objective_ms
        Improver(state, np.random.default_rng(0), FakeClock()).descend()
        gains.append(state.objective_ms / before)
    assert max(gains) <= 1.0
    assert np.mean(gains) < 0.85


@pytest.mark.parametrize("seed", range(10))
def test_searches_are_whole_and_no_worse_than_their_start(seed: int) -> None:
    of = problem(seed, full=0.8)
    bound_ms = lower_bound_ms(of.task, of.model)
    plain = of.without_margin()
    costs = []
    for patience in (0, 3, 10):
        state = search(of, bound_ms, 0, Effort(patience, 0.0, FakeClock()))
        assert state is not None
        assert is_whole(state)
        costs.append(state.copy_for(plain).objective_ms)
    start = construct(of, cut_all(of, of.work_at(bound_ms)))
    assert start is not None
    assert costs[0] <= start.copy_for(plain).objective_ms * 1.05  # margins differ
    assert costs[2] <= costs[0] * 1.02


@pytest.mark.parametrize("looks", [0, 1, 2, 5, 20, 60, 200])
def test_over_at_the_first_look_that_says_so(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan, whatever time there was; every loop looks once more, and leaves."""
    of = problem(4, full=0.7)
    clock = FakeClock(looks)
    refresh = State.refresh

    def counted(state: State) -> None:
        clock.refreshed += 1
        refresh(state)

    monkeypatch.setattr(State, "refresh", counted)
    state = search(of, lower_bound_ms(of.task, of.model), 0, Effort(10**6, 0.0, clock))
    assert state is not None
    assert is_whole(state)
    assert looks < clock.asked <= looks + 8
    assert clock.most_refreshed <= CHANGES_BETWEEN_LOOKS


def test_time_pays() -> None:
    """The best plan so far is given: looks at the clock are what a search has of time."""
    of = problem(4, full=0.7)
    bound_ms = lower_bound_ms(of.task, of.model)
    costs = []
    for looks in (0, 30, 300, 1500):
        state = search(of, bound_ms, 0, Effort(10**6, 0.0, FakeClock(looks)))
        assert state is not None
        costs.append(state.objective_ms)
    assert costs[3] <= costs[2] * 1.01
    assert costs[3] < costs[0] * 0.97


def test_ends_where_the_bound_is_near() -> None:
    of = problem(4)
    bound_ms = lower_bound_ms(of.task, of.model)
    for good_gap, asked in ((1e9, 200), (0.0, 10**9)):
        clock = FakeClock()
        assert search(of, bound_ms, 0, Effort(30, good_gap, clock)) is not None
        assert clock.asked < asked
        if good_gap == 0.0:
            assert clock.asked > 200


def test_one_table_on_one_rank() -> None:
    task = roomy_task(np.random.default_rng(0), (1, 1), 1)
    of = problem_of(task, model_of("shipped"))
    state = search(of, lower_bound_ms(task, of.model), 0, Effort(10, 0.0, FakeClock()))
    assert state is not None
    assert state.widths == [{0: int(of.num_steps[0])}] or state.mode[0] != COLUMNS


def test_nothing_that_fits() -> None:
    task = with_memory(roomy_task(np.random.default_rng(0), (1, 2), 3), 64)
    of = problem_of(task, model_of("shipped"))
    assert search(of, 1.0, 0, Effort(10, 0.0, FakeClock())) is None


@pytest.mark.parametrize("seed", range(5))
def test_other_seeds_are_other_searches_of_the_same_quality(seed: int) -> None:
    of = problem(6, full=0.7)
    bound_ms = lower_bound_ms(of.task, of.model)
    effort = Effort(20, 0.0, FakeClock())
    found = [search(of, bound_ms, s, dataclasses.replace(effort)) for s in (seed, seed, seed + 1)]
    first, again, other = (state.objective_ms for state in found if state is not None)
    assert first == again
    assert other == pytest.approx(first, rel=0.1)
