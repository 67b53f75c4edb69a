"""Checks of states that several test modules share, and a clock that counts calls."""

from typing import Any

import numpy as np

from dlrm_sharded.search.cuts import UnitCut
from dlrm_sharded.search.first_plan import first_plan
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State


class CountingClock:
    """A clock that is over after so many looks at it."""

    def __init__(self, looks: int = 10**9) -> None:
        self.looks = looks
        self.asked = 0

    @property
    def is_over(self) -> bool:
        self.asked += 1
        return self.asked > self.looks


def state_of_whole_units(problem: Problem) -> State:
    """Return a first plan in which no unit is cut."""
    state = first_plan(problem, [UnitCut((int(steps),)) for steps in problem.num_steps])
    return state


def kind_of_rows(problem: Problem, num_ranks: int) -> int:
    """Return the kind of row blocks, no replicas, on groups of so many ranks."""
    return next(
        kind
        for kind, blocks in enumerate(problem.blocks)
        if blocks.group_size == num_ranks and not blocks.is_replica
    )


def is_whole(state: State) -> bool:
    """Return whether everything is somewhere, where it may be, within memory."""
    problem = state.problem
    steps = [sum(widths.values()) for widths in state.widths]
    wanted = np.where(state.group == COLUMNS, problem.num_steps, 0)
    allowed = all(
        state.allowed_ranks(unit)[rank]
        for unit, widths in enumerate(state.widths)
        for rank in widths
    )
    return steps == wanted.tolist() and allowed and bool((state.free_bytes >= 0).all())


def pieces(state: State) -> tuple[Any, ...]:
    """Return the widths and the groups of all units, which define a state."""
    return [dict(sorted(widths.items())) for widths in state.widths], state.group.tolist()


def assert_same_books(state: State, other: State) -> None:
    """Compare all that states keep, up to the rounding of numbers added and taken away."""
    problem = state.problem
    assert pieces(state) == pieces(other)
    total = problem.load.sum() + sum(blocks.load.sum() for blocks in problem.blocks)
    for key in ("load", "host_load", "shared_ms"):
        np.testing.assert_allclose(
            getattr(state, key), getattr(other, key), rtol=1e-9, atol=1e-9 * total, err_msg=key
        )
    np.testing.assert_array_equal(state.free_bytes, other.free_bytes)
    np.testing.assert_array_equal(state.num_in_group, other.num_in_group)
    np.testing.assert_array_equal(state.separated_count, other.separated_count)
    assert _pieces_in_slots(state) == _pieces_in_slots(other)


def _pieces_in_slots(state: State) -> list[list[tuple[int, int]]]:
    """Return unit and shape of the column pieces of each rank, by its slots."""
    for rank, slots in enumerate(state.slots_on_rank):
        assert (state.piece_rank[slots] == rank).all()
    assert (state.piece_rank >= 0).sum() == sum(map(len, state.slots_on_rank))
    return [
        sorted(
            zip(state.piece_unit[slots].tolist(), state.piece_shape[slots].tolist(), strict=True)
        )
        for slots in state.slots_on_rank
    ]
