"""Improve: take the best move again and again until none improves the smooth objective.

The objective is a maximum over ranks, which most moves do not change. The smooth objective falls
whenever a full rank gets less to do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlrm_sharded.search.block_moves import BlockNeighborhood
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.moves import Move, Neighborhood
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.stopping import Clock

MAX_STUCK = 128
"""Number of ranks without a move at which a descent tries no further ranks."""

NUM_TRIED = 3
"""Number of a rank's best moves that are tried with exact loads."""

MIN_MOVE_GAIN = 1e-7
"""Smallest relative improvement of the smooth objective for which a move is made."""

MIN_SHARE = 1e-3
"""Ranks that contribute less than this fraction of the fullest rank's share are not improved."""


class Descent:
    """Improves one state by moves.

    Args:
        splits, budget: see `StateMoves`.
    """

    def __init__(
        self,
        state: State,
        rng: np.random.Generator,
        clock: Clock,
        *,
        splits: bool = True,
        budget: MoveBudget | None = None,
    ) -> None:
        self._state = state
        self._clock = clock
        self._neighborhood = Neighborhood(state, rng, splits, budget)
        self._blocks = BlockNeighborhood(state, rng, splits, budget)

    def run(self, max_stuck: int = MAX_STUCK) -> None:
        """Take a good move from the fullest rank that has one, until no rank has any.

        Args:
            max_stuck: number of ranks without a move after which no further ranks are tried.
        """
        stuck: set[int] = set()
        has_moved = False
        while not self._clock.is_over:
            objective = self._objective()
            rank = _fullest_rank(objective, stuck) if len(stuck) < max_stuck else None
            if rank is None:
                # Row blocks load many ranks alike, so no single rank would give them up.
                has_changed = self._make_one(self._blocks.row_joins(objective), objective)
                if max_stuck > 1:  # the shortest descents follow a change of cuts
                    has_changed |= self._make_all(self._blocks.other_cuts)
                if not has_moved and not has_changed:
                    return
                stuck.clear()
                has_moved = False
            elif self._improve(rank, objective):
                has_moved = True  # ranks that were stuck are tried again after the joins
            else:
                stuck.add(rank)

    def _improve(self, rank: int, objective: SmoothObjective) -> bool:
        """Make a transfer from a rank; if none improves the state, another move."""
        # The quickest to evaluate come first, and row blocks last, because they cost all ranks of a
        # group a reduce-scatter.
        ways = (self._neighborhood.transfers, self._neighborhood.swaps, self._blocks.row_cuts)
        return any(self._make_one(moves_of(rank, objective), objective) for moves_of in ways)

    def _make_all(self, moves_of: Callable[[SmoothObjective], list[Move]]) -> bool:
        """Make all moves that still improve the exact smooth objective after the earlier ones."""
        moves = moves_of(self._objective())
        has_changed = False
        for move in sorted(moves, key=lambda move: move.change_ms):
            if self._clock.is_over or move.change_ms >= 0:
                break
            if self._state.group[move.edits[0].unit] == COLUMNS:  # not moved yet, in another kind
                has_changed |= self._make_one([move], self._objective())
        return has_changed

    def _objective(self) -> SmoothObjective:
        return SmoothObjective(self._state)

    def _make_one(self, moves: list[Move], objective: SmoothObjective) -> bool:
        """Make the first of the best moves that also improves the exact smooth objective."""
        state, budget = self._state, self._neighborhood.budget
        for move in sorted(moves, key=lambda move: move.change_ms)[:NUM_TRIED]:
            # Moves are in the order of their gains, so no later one is better.
            if move.change_ms >= -MIN_MOVE_GAIN * objective.value_ms:
                return False
            log_length = len(state.log)
            for edit in move.edits:
                state.apply(edit)
            state.refresh()
            after_ms = self._objective().value_ms
            is_better = after_ms < objective.value_ms * (1 - MIN_MOVE_GAIN)
            # Moves made since this one was found may have taken its memory.
            is_better = is_better and bool((state.free_bytes >= 0).all())
            units = {edit.unit for edit in move.edits}
            if is_better and (budget is None or budget.accept(units)):
                return True
            state.undo(log_length)
        return False


def _fullest_rank(objective: SmoothObjective, stuck: set[int]) -> int | None:
    """Return the fullest rank that is not stuck; None if no such rank contributes enough."""
    shares = objective.rank_shares()
    enough = MIN_SHARE * shares.max()
    shares[list(stuck)] = -np.inf
    rank = int(shares.argmax())
    return rank if shares[rank] >= enough else None
