"""Descents: never worse, always whole, and they can be undone."""

import numpy as np
import pytest

from dlrm_sharded.search.descent import Descent
from tests.unit.search.made_up import searched_problem
from tests.unit.search.states import (
    CountingClock,
    assert_same_books,
    is_whole,
    state_of_whole_units,
)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("seed", range(15))
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


def test_descents_pay() -> None:
    gains = []
    for seed in range(15):
        state = state_of_whole_units(searched_problem(seed))
        before = state.objective_ms
        Descent(state, np.random.default_rng(0), CountingClock()).run()
        gains.append(state.objective_ms / before)
    assert max(gains) <= 1.0
    assert np.mean(gains) < 0.85
