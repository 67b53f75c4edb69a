"""Perturb: parts of a plan are removed and rebuilt, with a new cut of one table.

This is large neighborhood search (Shaw 1998). It is also the search over splits, for which
NeuroShard has a beam (arXiv:2305.01868, sec. 3.3): the tables that get a new cut are on the
costliest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dlrm_sharded.search.cuts import CutOption, cut_options
from dlrm_sharded.search.greedy_placer import GreedyPlacer, least_loaded_group
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import COLUMNS, State

NUM_COSTLIEST = 3
"""Number of the fullest rank's costliest units, one of which may get a new cut. Study: rebuilds."""

NUM_OPTIONS = 6
"""Number of a unit's cheapest cuts that are tried. Study: rebuilds."""

KEEP_CUTS = 0.4
"""Share of the rebuilds that keep all cuts. Study: rebuilds."""

MAX_RANDOM_RANKS = 3
"""Largest number of ranks that are rebuilt besides the fullest and the emptiest. Study:
rebuilds."""

JOIN = 0.3
"""Share of the rebuilds that place whole the units of which all pieces were taken away. Study:
joining and spreading."""

SPREAD = 0.2
"""Share of the rebuilds that place one of the largest units last, in parts of any width: where
memory is tight, an even cut would take memory that other units need in one piece. Study: joining
and spreading."""

NOISE = 0.2
"""Relative noise of the processing times by which pieces are ordered. Study: rebuilds."""

Piece = tuple[int, int]
"""A unit and a width."""

Choice = TypeVar("Choice")


class Rebuilder:
    """Rebuilds parts of one state.

    Args:
        splits: whether units may get new cuts.
    """

    def __init__(self, state: State, rng: np.random.Generator, *, splits: bool = True) -> None:
        self._state = state
        self._rng = rng
        self._splits = splits
        self._known_options: dict[int, list[CutOption]] = {}

    def rebuild(self) -> bool:
        """Take all pieces from the fullest rank and a few others, and place them anew.

        Returns:
            Whether everything was placed within memory and constraints; if not, the state lacks
            some pieces and must be undone.
        """
        state, rng = self._state, self._rng
        fullest_rank = int(SmoothObjective(state).rank_shares().argmax())
        ranks = {fullest_rank, int(state.load.sum(axis=1).argmin())}
        num_random = rng.integers(1, MAX_RANDOM_RANKS + 1)
        ranks.update(rng.integers(state.problem.world_size, size=num_random).tolist())
        # The new cut comes first: it may take pieces from ranks that are not rebuilt.
        pieces = self._change_cut(fullest_rank) if self._splits else []
        # Blocks may need memory that other pieces have to free.
        ranks.update(np.flatnonzero(state.free_bytes < 0).tolist())
        for rank in sorted(ranks):
            for slot in list(state.slots_on_rank[rank]):  # a copy: the list shrinks
                unit = int(state.piece_unit[slot])
                pieces.append((unit, state.widths[unit][rank]))
                state.set_width(unit, rank, 0)
        if self._splits and rng.random() < JOIN:
            pieces = self._joined(pieces)
        last = self._take_large(pieces) if self._splits and rng.random() < SPREAD else None
        state.refresh()
        return self._insert([piece for piece in pieces if piece[0] != last], last)

    def _joined(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces, with units made whole that have several pieces here, and no other."""
        number = Counter(unit for unit, _ in pieces)
        joined = [
            unit
            for unit, count in number.items()
            if count > 1 and self._can_spread(unit) and not self._state.widths[unit]
        ]
        kept = [piece for piece in pieces if piece[0] not in joined]
        return kept + [(unit, int(self._state.problem.num_steps[unit])) for unit in joined]

    def _take_large(self, pieces: list[Piece]) -> int | None:
        """Remove one of the largest units with pieces to place from all ranks, and return it."""
        state, size = self._state, self._state.problem.size_bytes[self._state.problem.whole_shape]
        units = sorted({unit for unit, _ in pieces if self._can_spread(unit)})
        if not units:
            return None
        unit = self._one_of_the_first(sorted(units, key=lambda unit: -int(size[unit])))
        state.remove_columns(unit)
        return unit

    def _can_spread(self, unit: int) -> bool:
        """Return whether a unit may be cut into pieces of any widths."""
        return bool(self._state.problem.num_steps[unit] > 1)

    def _change_cut(self, rank: int) -> list[Piece]:
        """Remove one of the rank's costliest units from all ranks, and cut it in another way.

        Returns:
            Its new column pieces, which are still to be placed; row blocks are placed at once.
        """
        state, rng = self._state, self._rng
        units = [unit for unit in self._cuttable_units(rank) if len(self._options(unit)) > 1]
        if not units or rng.random() < KEEP_CUTS:
            return []
        unit = int(self._one_of_the_first(units))
        widths_now = tuple(sorted(state.widths[unit].values(), reverse=True))
        options = [option for option in self._options(unit) if option.cut.widths != widths_now]
        if not options:
            return []
        cut = self._one_of_the_first(options).cut
        state.remove_columns(unit)
        group = COLUMNS if cut.kind is None else self._least_loaded_group(unit, cut.kind)
        state.set_group(unit, group)
        if group != COLUMNS:
            return []
        # Where no group may hold row blocks, the unit stays whole.
        widths = cut.widths or (int(state.problem.num_steps[unit]),)
        return [(unit, width) for width in widths]

    def _cuttable_units(self, rank: int) -> list[int]:
        """Return the costliest units of a rank, and a random one of all units in row blocks."""
        state = self._state
        slots = np.array(state.slots_on_rank[rank], dtype=np.int64)
        in_row_blocks = np.flatnonzero(state.group != COLUMNS)
        return [
            *state.costliest_units(slots, NUM_COSTLIEST),
            *self._rng.permutation(in_row_blocks)[:1].tolist(),
        ]

    def _least_loaded_group(self, unit: int, kind: int) -> int:
        """Return the least loaded group for row blocks, `COLUMNS` if constraints allow none."""
        state, blocks = self._state, self._state.problem.blocks[kind]
        group = least_loaded_group(blocks, state.allowed_ranks(unit), state.load)
        return COLUMNS if group is None else group

    def _one_of_the_first(self, choices: Sequence[Choice]) -> Choice:
        """Return one of the choices, each half as likely as the one before it."""
        return choices[min(int(self._rng.geometric(0.5)), len(choices)) - 1]

    def _options(self, unit: int) -> list[CutOption]:
        if unit not in self._known_options:
            options = cut_options(self._state.problem, unit)
            self._known_options[unit] = sorted(options, key=lambda o: o.total_ms)[:NUM_OPTIONS]
        return self._known_options[unit]

    def _insert(self, pieces: list[Piece], last: int | None) -> bool:
        """Place pieces, roughly the costliest first, each where it raises the norm least.

        Args:
            last: a unit whose columns are placed after all pieces, wherever these leave memory.
        """
        state, problem = self._state, self._state.problem
        # Row blocks were put on a group before it was known what else it holds.
        if (state.free_bytes < 0).any():
            return False
        shapes = np.array([problem.shape(*piece) for piece in pieces], np.int64)
        # Without noise, the same pieces would go to the same ranks again.
        noise = self._rng.uniform(1 - NOISE, 1 + NOISE, len(pieces))
        processing_ms = problem.processing_ms(problem.load[shapes]) * noise
        placer = GreedyPlacer(state, scale=np.maximum(state.load.mean(axis=0), 1e-12))
        for i in np.argsort(-processing_ms, kind="stable").tolist():
            unit, width = pieces[i]
            rank = placer.best_rank(unit, width, placer.norm_increase(int(shapes[i])))
            if rank is not None:
                placer.place(unit, rank, width)
                continue
            is_whole = width == int(problem.num_steps[unit])
            if not (self._splits and is_whole and self._can_spread(unit)):
                return False
            if not placer.spread(unit):
                return False
        if last is not None and not placer.spread(last):
            return False
        state.refresh()
        return True
