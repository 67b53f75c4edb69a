"""What units cost in row blocks, and whole again."""

import numpy as np
import pytest

from dlrm_sharded import Table
from dlrm_sharded.search.block_moves import BlockNeighborhood
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import COLUMNS, SetGroup, SetWidth, State
from tests.unit.cost.worked_bound import worked_model
from tests.unit.made_up import USED_ONCE, task_of
from tests.unit.search.made_up import problem_of


def test_a_unit_is_joined_on_its_best_rank() -> None:
    """Where prices are linear and every rank has a piece already, estimates are exact."""
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
