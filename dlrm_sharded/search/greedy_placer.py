"""Construct: place pieces one after another, each where it adds least to a norm of the loads.

Letters: L loads, W ranks; see `problem.py`.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.cost.workload import Floats, Indices, Mask
from dlrm_sharded.search.problem import Blocks, by_group
from dlrm_sharded.search.state import State

NUM_SPREAD = 32
"""Number of parts in which the steps of a unit are spread over ranks. Study: joining and
spreading."""


class GreedyPlacer:
    """Places pieces on a state, and keeps approximate loads that need no refresh.

    Args:
        scale: [L], loads by which the ranks' loads are divided, so that their powers compare.

    Attributes:
        load: [W, L], the state's loads, plus the loads of what was placed since.
        free_bytes: [W], memory of each rank that is left.
    """

    def __init__(self, state: State, scale: Floats) -> None:
        self._state = state
        self._problem = state.problem
        self._scale = scale
        self.load = state.load.copy()
        self.free_bytes = state.free_bytes.copy()
        self._demand = state.demand.copy()

    def norm_increase(self, shape: int) -> Floats:
        """Return [W], by how much a piece on each rank raises the sum of 8th powers of loads."""
        return self._norm_increase(0.0, self._added_load(shape, slice(None)))

    def best_rank(self, unit: int, width: int, score: Floats) -> int | None:
        """Return the rank of least score [W] that may hold the piece; None if there is none."""
        shape = self._problem.shape(unit, width)
        if not self._problem.possible[shape]:
            return None
        fits = self.free_bytes >= self._problem.size_bytes[shape]
        if self._problem.restricts_ranks:
            fits &= self._state.allowed_ranks(unit)
        # A rank that holds a piece of the unit would get a wider piece, not a second one.
        fits[list(self._state.widths[unit])] = False
        return int(np.where(fits, score, np.inf).argmin()) if fits.any() else None

    def place(self, unit: int, rank: int, width: int) -> None:
        """Give a rank a column piece."""
        shape = self._problem.shape(unit, width)
        self._state.set_width(unit, rank, width)
        self.load[rank] += self._added_load(shape, rank)
        self._demand[rank] += self._problem.demand[shape]
        self.free_bytes[rank] -= self._problem.size_bytes[shape]

    def spread(self, unit: int) -> bool:
        """Place a unit that has no pieces, a few steps at a time, where they add least.

        Returns:
            Whether all of it fits; if not, nothing is placed.
        """
        problem = self._problem
        first, most = int(problem.first_shape[unit]), problem.max_width(unit)
        allowed = self._state.allowed_ranks(unit)
        held = np.zeros(problem.world_size, dtype=np.int64)  # steps of each rank
        added = np.zeros_like(self.load)  # loads of these steps
        left = int(problem.num_steps[unit])
        at_once = -(-left // NUM_SPREAD)
        while left:
            more = held + min(at_once, left)
            shape = first + np.minimum(more, most) - 1
            fits = allowed & (more <= most) & (problem.size_bytes[shape] <= self.free_bytes)
            if not fits.any():
                if at_once == 1:
                    return False
                at_once = 1  # the last gaps are small
                continue
            then_added = self._added_load(shape, slice(None))
            score = np.where(fits, self._norm_increase(added, then_added), np.inf)
            rank = int(score.argmin())
            left -= int(more[rank] - held[rank])
            held[rank], added[rank] = more[rank], then_added[rank]
        for rank in np.flatnonzero(held).tolist():
            self.place(unit, rank, int(held[rank]))
        return True

    def place_blocks(self, unit: int, blocks: Blocks) -> bool:
        """Put a unit in row blocks on the least loaded group where they fit, if there is one."""
        fits = by_group(self.free_bytes, blocks.group_size) >= blocks.size_bytes[unit]
        allowed = self._state.allowed_ranks(unit) & fits.ravel()
        group = least_loaded_group(blocks, allowed, self.load)
        if group is None:
            return False
        rank_group = self._problem.groups[group]
        members = rank_group.members
        self._state.set_group(unit, group)
        self.load[members] += blocks.load[unit]
        self._demand[members] += blocks.demand[unit]
        self._demand[rank_group.ranks[-1]] -= blocks.missing[unit]
        self.free_bytes[members] -= blocks.size_bytes[unit]
        return True

    def _norm_increase(self, added: Floats | float, then_added: Floats) -> Floats:
        """Return [W], by how much the sum of powers rises from one load [W, L] added to another."""
        before = (self.load + added) / self._scale
        after = (self.load + then_added) / self._scale
        for _ in range(3):  # x -> x^2 -> x^4 -> x^8
            before, after = before * before, after * after
        # Loads weigh as much as they do in the objective: by their size on a mean rank.
        return (after - before) @ self._scale

    def _added_load(self, shape: int | Indices, ranks: int | slice) -> Floats:
        """Return [L] or [W, L], by how much pieces, or the same piece, raise the loads of ranks."""
        problem = self._problem
        return problem.load[shape] + problem.crowding_load(
            problem.demand[shape], self._demand[ranks]
        )


def least_loaded_group(blocks: Blocks, allowed: Mask, load: Floats) -> int | None:
    """Return the least loaded group whose ranks are all allowed; None if there is none.

    Args:
        allowed: [W], ranks that may hold a block.
        load: [W, L], of the ranks; that of a group is the sum over its ranks.
    """
    fits = by_group(allowed, blocks.group_size).all(axis=1)
    if not fits.any():
        return None
    group_load = load.reshape(len(blocks.groups), -1).sum(axis=1)
    return blocks.groups[int(np.where(fits, group_load, np.inf).argmin())]
