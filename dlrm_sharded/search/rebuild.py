"""Leaving a local optimum: parts of a plan taken down and built anew, one table cut otherwise.

Large neighbourhood search (Shaw 1998). It is also the search over splits, for which NeuroShard has
a beam (arXiv:2305.01868, sec. 3.3): the tables cut otherwise are those that hold up the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dlrm_sharded.search.construct import ANY_HOST, Option, may_hold, options
from dlrm_sharded.search.potential import Potential
from dlrm_sharded.search.state import COLUMNS, State, by_host

NUM_COSTLIEST, NUM_OPTIONS, KEEP_CUTS = 3, 6, 0.4
"""A rebuild cuts one of so many units in one of so many ways; none at all in this share."""

MOST_OTHERS = 3
"""Ranks that are rebuilt besides the fullest and the emptiest."""

NOISE = 0.2
"""Of the costs by which pieces are ordered."""


T = TypeVar("T")


class Rebuilder:
    """Rebuilds parts of one state.

    Args:
        splits: whether tables may be cut otherwise.
    """

    def __init__(self, state: State, rng: np.random.Generator, *, splits: bool = True) -> None:
        self._state = state
        self._rng = rng
        self._splits = splits
        self._known_options: dict[int, list[Option]] = {}

    def rebuild(self) -> bool:
        """Take all pieces from the fullest rank and a few others, and place them anew.

        False where that could not be done within memory and constraints; the state may have changed
        then.
        """
        state, rng = self._state, self._rng
        fullest = int(Potential(state).of_ranks().argmax())
        ranks = {fullest, int(state.load.sum(axis=1).argmin())}
        num_others = rng.integers(1, MOST_OTHERS + 1)
        ranks.update(rng.integers(state.problem.world_size, size=num_others).tolist())
        pieces = self._recut(fullest) if self._splits else []
        for rank in sorted(ranks):
            for slot in list(state.on_rank[rank]):
                unit = int(state.piece_unit[slot])
                pieces.append((unit, state.widths[unit][rank]))
                state.set_width(unit, rank, 0)
        state.refresh()
        return self._insert(pieces)

    def _recut(self, rank: int) -> list[tuple[int, int]]:
        """Take one of the costliest units of a rank from everywhere; its pieces in another cut."""
        state, problem, rng = self._state, self._state.problem, self._rng
        slots = np.array(state.on_rank[rank], dtype=np.int64)
        work = problem.work_ms(problem.load[state.piece_shape[slots]])
        costliest = slots[np.argsort(-work, kind="stable")[:NUM_COSTLIEST]]
        units = [*state.piece_unit[costliest].tolist()]
        units += rng.permutation(np.flatnonzero(state.mode != COLUMNS))[:1].tolist()
        units = [u for u in units if len(self._options(u)) > 1]
        if not units or rng.random() < KEEP_CUTS:
            return []
        unit = int(self._one_of_the_first(units))
        as_it_is = tuple(sorted(state.widths[unit].values(), reverse=True))
        found = [option for option in self._options(unit) if option.cut.widths != as_it_is]
        if not found:
            return []
        cut = self._one_of_the_first(found).cut
        for other in list(state.widths[unit]):
            state.set_width(unit, other, 0)
        mode = cut.mode
        if mode == ANY_HOST:
            loads = by_host(state.load.sum(axis=1), state.num_hosts).sum(axis=1)
            may = by_host(may_hold(state, unit), state.num_hosts).all(axis=1)
            mode = int(np.where(may, loads, np.inf).argmin()) if may.any() else COLUMNS
        state.set_mode(unit, mode)
        if mode == COLUMNS:
            return [(unit, width) for width in cut.widths or (int(problem.num_steps[unit]),)]
        return []

    def _one_of_the_first(self, among: Sequence[T]) -> T:
        """Each half as likely as the one before it."""
        return among[min(int(self._rng.geometric(0.5)), len(among)) - 1]

    def _options(self, unit: int) -> list[Option]:
        if unit not in self._known_options:
            found = options(self._state.problem, unit)
            self._known_options[unit] = sorted(found, key=lambda o: o.total_ms)[:NUM_OPTIONS]
        return self._known_options[unit]

    def _insert(self, pieces: list[tuple[int, int]]) -> bool:
        """Roughly the costliest first, each where it adds least to the 8-norm of the loads."""
        state, problem = self._state, self._state.problem
        if (state.free_bytes < 0).any():
            return False
        shape = np.array([problem.first[unit] + width - 1 for unit, width in pieces], np.int64)
        noise = self._rng.uniform(1 - NOISE, 1 + NOISE, len(pieces))
        work = problem.work_ms(problem.load[shape]) * noise
        load, free = state.load.copy(), state.free_bytes.copy()
        mean = np.maximum(load.mean(axis=0), 1e-12)
        for i in np.argsort(-work, kind="stable").tolist():
            unit, width = pieces[i]
            before = load / mean
            after = before + problem.load[shape[i]] / mean
            for _ in range(3):
                before, after = before * before, after * after
            fits = (free >= problem.size_bytes[shape[i]]) & may_hold(state, unit)
            fits[list(state.widths[unit])] = False
            if not fits.any():
                return False
            rank = int(np.where(fits, (after - before) @ mean, np.inf).argmin())
            state.set_width(unit, rank, width)
            load[rank] += problem.load[shape[i]]
            free[rank] -= problem.size_bytes[shape[i]]
        state.refresh()
        return True
