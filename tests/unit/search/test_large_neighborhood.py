"""Rebuilds of a few ranks with new cuts of what is costliest there, and moves out of row blocks."""

import numpy as np
import pytest

from dlrm_sharded import Table
from dlrm_sharded.search.block_moves import BlockNeighborhood
from dlrm_sharded.search.large_neighborhood import Rebuilder
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import COLUMNS, SetGroup, SetWidth, State
from tests.unit.cost.worked_bound import worked_model
from tests.unit.search.states import is_whole, state_of_whole_units
from tests.unit.search.synthetic import model_of, problem_of, searched_problem
from tests.unit.synthetic import USED_ONCE, tables_of, task_of


@pytest.mark.parametrize("splits", [True, False])
def test_rebuilds_may_cut_what_is_whole(splits: bool) -> None:
    """Many of them do, unless the search may split nothing."""
    problem = searched_problem(1, full=0.3)
    num_cut = 0
    for seed in range(20):
        state = state_of_whole_units(problem)
        if Rebuilder(state, np.random.default_rng(seed), splits=splits).rebuild():
            assert is_whole(state)
            num_cut += any(len(widths) != 1 for widths in state.widths)
    assert num_cut >= 5 if splits else num_cut == 0


def state_of_halves(problem: Problem) -> State:
    """Return the state with half of every unit on each of two ranks."""
    state = State(problem)
    for unit, steps in enumerate(problem.num_steps.tolist()):
        for rank in range(2):
            state.set_width(unit, rank, steps // 2)
    state.refresh()
    return state


def test_rebuilds_make_whole_what_was_cut() -> None:
    """Two tables in halves fit whole, one on each rank."""
    problem = problem_of(task_of(tables_of((500, 32, 9.0), (500, 32, 9.0)), 2), model_of("plain"))
    num_joined = 0
    for seed in range(20):
        state = state_of_halves(problem)
        if Rebuilder(state, np.random.default_rng(seed)).rebuild():
            assert is_whole(state)
            num_joined += all(len(widths) == 1 for widths in state.widths)
    assert num_joined >= 3


def test_rebuilds_cut_unevenly_what_does_not_fit_in_even_pieces() -> None:
    """On full ranks, one table is whole only if the larger one is in a quarter and the rest."""
    task = task_of(tables_of((500, 64, 9.0), (500, 32, 9.0)), 2)
    task = task_of(task.tables, 2, sum(map(task.topology.table_bytes, task.tables)) // 2)
    problem = problem_of(task, model_of("plain"))
    num_whole = 0
    for seed in range(60):
        state = state_of_halves(problem)
        if Rebuilder(state, np.random.default_rng(seed)).rebuild():
            num_whole += len(state.widths[1]) == 1
            assert (state.free_bytes == 0).all()
    assert num_whole > 0


def test_a_unit_is_joined_on_its_best_rank() -> None:
    """Where costs are linear and every rank has a piece already, estimates are exact."""
    num_ids = (10.0, 10.01, 10.02, 0.01, 0.02)  # even loads, so that every rank counts
    tables = [Table(f"t{i}", 3000, 16, ids, USED_ONCE) for i, ids in enumerate(num_ids)]
    problem = problem_of(task_of(tables, 3), worked_model())
    state = State(problem)
    for unit in range(3):
        state.set_width(unit, unit, int(problem.num_steps[unit]))
    for unit in (3, 4):
        state.set_group(unit, problem.blocks[0].groups[0])
    state.refresh()
    state.log.clear()
    objective = SmoothObjective(state)

    def value_ms() -> float:
        powers = objective.powers_of(state.load)
        return float(objective.norm_ms(powers.sum(axis=0))) + state.shared_ms

    before_ms = value_ms()
    near = BlockNeighborhood(state, np.random.default_rng(0))
    moves = [move for move in near.row_joins(objective) if isinstance(move.edits[-1], SetWidth)]
    assert len(moves) == 2
    for unit, move in zip((3, 4), moves, strict=True):
        changes = []
        for rank in range(3):
            for edit in (SetGroup(unit, COLUMNS), SetWidth(unit, rank, 4)):
                state.apply(edit)
            state.refresh()
            changes.append(value_ms() - before_ms)
            state.undo()
        assert move.change_ms == pytest.approx(min(changes), rel=1e-6)
        assert move.edits == [SetGroup(unit, COLUMNS), SetWidth(unit, int(np.argmin(changes)), 4)]
