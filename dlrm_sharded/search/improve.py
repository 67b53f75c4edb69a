"""Better plans by small changes: parts of tables moved, exchanged, split, merged, cut into rows.

The objective is a maximum over ranks, which most changes leave as it is. So the search descends a
smooth stand-in, the 128-norm of the ranks' loads, for which every full rank counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.search.neighbours import MANY_RANKS, Change, Neighbours, Step
from dlrm_sharded.search.potential import Potential
from dlrm_sharded.search.state import State

NUM_TRIED = 3
"""Of the best changes of a rank, with exact loads."""

TOLERANCE = 1e-7
LEAST_WEIGHT = 1e-3
"""Of the fullest rank's part in the potential, that a rank must have to be worth a change."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Until when a search may go on."""

    deadline: float

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.deadline


class Limits(Protocol):
    """What of a state may change."""

    def changeable(self) -> NDArray[np.bool_] | None:
        """[U], units that may; None for all."""

    def most_bytes(self) -> Floats | None:
        """[U], how much of a unit may move; None for any."""

    def accept(self, units: set[int]) -> bool:
        """Whether the state may stay as it is, now that these units were changed."""


class Improver:
    """Changes one state for the better.

    Args:
        splits: whether tables may be cut into more pieces than they are in.
        within: limits beside memory and constraints.
    """

    def __init__(
        self,
        state: State,
        rng: np.random.Generator,
        clock: Clock,
        *,
        splits: bool = True,
        within: Limits | None = None,
    ) -> None:
        self._state = state
        self._clock = clock
        self._within = within
        self._neighbours = Neighbours(state, rng, splits=splits)
        self._limit()

    def descend(self, max_stuck: int = MANY_RANKS) -> None:
        """Take the best change of the fullest rank that has one, until none has.

        Args:
            max_stuck: ranks without one, after which no more are looked at.
        """
        stuck: set[int] = set()
        changed = False
        while not self._clock.is_over:
            potential = Potential(self._state)
            rank = _fullest(potential, stuck) if len(stuck) < max_stuck else None
            if rank is None:
                joins = self._neighbours.row_joins(potential)
                if not changed and not self._make_one(joins, potential):
                    return
                stuck.clear()
                changed = False
            elif self._improve(rank, potential):
                changed = True
            else:
                stuck.add(rank)

    def _improve(self, rank: int, potential: Potential) -> bool:
        near = self._neighbours
        found = [*near.transfers(rank, potential), *near.swaps(rank, potential)]
        return self._make_one(found, potential) or self._make_one(
            near.row_cuts(rank, potential), potential
        )

    def _make_one(self, changes: list[Change], potential: Potential) -> bool:
        """Make the first of the best changes that keeps what it promises."""
        state = self._state
        for gain, steps in sorted(changes, key=lambda change: change[0])[:NUM_TRIED]:
            if gain >= -TOLERANCE * potential.value:
                return False
            mark = len(state.log)
            for unit, rank, value in steps:
                if rank < 0:
                    state.set_mode(unit, value)
                else:
                    state.set_width(unit, rank, value)
            state.refresh()
            after = Potential(state).value
            if after < potential.value * (1 - TOLERANCE) and self._accept(steps):
                return True
            state.undo(mark)
        return False

    def _accept(self, steps: list[Step]) -> bool:
        if self._within is None:
            return True
        accepted = self._within.accept({unit for unit, _, _ in steps})
        self._limit()
        return accepted

    def _limit(self) -> None:
        if self._within is not None:
            self._neighbours.changeable = self._within.changeable()
            self._neighbours.most_bytes = self._within.most_bytes()


def _fullest(potential: Potential, stuck: set[int]) -> int | None:
    """The fullest rank that is not stuck; None where all others hardly count."""
    weight = potential.of_ranks()
    least = LEAST_WEIGHT * weight.max()
    weight[list(stuck)] = -np.inf
    rank = int(weight.argmax())
    return rank if weight[rank] >= least else None
