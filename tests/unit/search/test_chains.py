"""Chains of two transfers: exchanges of parts where no single move helps."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.search.chains import ChainNeighborhood
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import State
from tests.unit.made_up import tables_of, task_of
from tests.unit.search.made_up import model_of, problem_of
from tests.unit.search.states import CountingClock, assert_same_books


@pytest.fixture
def full_state() -> State:
    """A busy table whole on the first rank, an idle one on both, and no room on either."""
    made = tables_of((500, 32, 90.0), (500, 64, 1.0))
    tables = [dataclasses.replace(table, layouts=frozenset({"columns"})) for table in made]
    task = task_of(tables, 2)
    task = task_of(tables, 2, sum(map(task.topology.table_bytes, tables)) // 2)
    state = State(problem_of(task, model_of("plain")))
    for unit, rank, width in ((0, 0, 8), (1, 0, 4), (1, 1, 12)):
        state.set_width(unit, rank, width)
    state.refresh()
    state.log.clear()
    assert (state.free_bytes == 0).all()
    return state


def test_columns_are_exchanged_between_full_ranks(full_state: State) -> None:
    before = full_state.copy_for(full_state.problem)
    descent = Descent(full_state, np.random.default_rng(0), CountingClock())
    descent.run()
    assert_same_books(full_state, before)
    descent.run(max_chained=1)
    assert full_state.widths == [{0: 4, 1: 4}, {0: 8, 1: 8}]


def test_chains_change_nothing_until_they_are_made(full_state: State) -> None:
    before = full_state.copy_for(full_state.problem)
    objective = SmoothObjective(full_state)
    near = ChainNeighborhood(full_state, np.random.default_rng(0))
    best = min(near.chains(0, objective), key=lambda move: move.change_ms)
    assert_same_books(full_state, before)
    for edit in best.edits:
        full_state.apply(edit)
    full_state.refresh()
    assert (full_state.free_bytes == 0).all()
    assert best.change_ms < 0
    assert SmoothObjective(full_state).value_ms < objective.value_ms


def test_no_chain_takes_its_first_transfer_back(full_state: State) -> None:
    near = ChainNeighborhood(full_state, np.random.default_rng(0))
    for move in near.chains(0, SmoothObjective(full_state)):
        assert {edit.unit for edit in move.edits[:2]} != {edit.unit for edit in move.edits[2:]}
