"""Chains of two transfers: a part to a rank that then gives a part of another unit away.

Such a chain exchanges parts of any size, or passes them on from rank to rank, where the first
transfer by itself does not pay or finds no room: an ejection chain (Glover 1996).
"""

from __future__ import annotations

from dlrm_sharded.search.moves import Move, Neighborhood
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import SetWidth


class ChainNeighborhood(Neighborhood):
    """The chains that begin at a rank of a state."""

    def chains(self, rank: int, objective: SmoothObjective) -> list[Move]:
        """Return moves of two transfers each, the first of which may be to a full rank."""
        state, moves = self.state, list[Move]()
        for first in self.transfers(rank, objective, need_room=False):
            log_length = len(state.log)
            for edit in first.edits:
                state.apply(edit)
            state.refresh()
            to = first.edits[-1]
            assert isinstance(to, SetWidth)
            after = SmoothObjective(state, objective.num_squarings)
            begun_ms = after.value_ms - objective.value_ms
            moves += [
                Move(begun_ms + second.change_ms, [*first.edits, *second.edits])
                for second in self.transfers(to.rank, after)
                if second.edits[0].unit != to.unit  # both would be one transfer
            ]
            state.undo(log_length)
        return moves
