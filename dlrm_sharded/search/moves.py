"""Improve: moves of column pieces between ranks and their gains, computed in batches.

All moves that take load from one rank are evaluated at once: a move between two ranks changes two
terms of each sum of powers. Shapes cost here what they do on an average rank, so a gain is an
estimate; its exact value is known when the move is made.

Letters: M moves, B other ranks or pieces, L loads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dlrm_sharded.cost.workload import Floats, Indices, Mask
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import Edit, SetWidth, State

MAX_PARTS = 8
"""Largest number of sizes that are tried for the part moved from a piece."""

MANY_RANKS = 128
"""Largest number of ranks at which moves are tried with every other rank."""

NUM_LEAST_LOADED, NUM_RANDOM_RANKS = 32, 16
"""Numbers of other ranks with which moves are tried if there are more than `MANY_RANKS`."""

MAX_PIECES, MAX_OTHER_PIECES = 32, 512
"""Largest numbers of pieces of a rank, and of all other ranks, for which swaps are tried. Study:
swaps."""

NUM_BEST = 3
"""Number of transfers, and of swaps, that are returned."""


class Move(NamedTuple):
    """A change of a state.

    Args:
        change_ms: estimated change of the smooth objective; negative for an improvement.
    """

    change_ms: float
    edits: Sequence[Edit]


class _Parts(NamedTuple):
    """Parts [M] of the pieces of a rank.

    Args:
        shape: shape of the piece.
        width: steps of the part.
    """

    unit: Indices
    shape: Indices
    width: Indices


@dataclass(frozen=True, slots=True)
class StateMoves:
    """The base class of the neighborhoods of a state.

    Args:
        splits: whether tables may be cut into more pieces than they are in.
        budget: limits on what may move; None for no limits.
    """

    state: State
    rng: np.random.Generator
    splits: bool = True
    budget: MoveBudget | None = None

    @property
    def problem(self) -> Problem:
        return self.state.problem

    def _changeable_slots(self, rank: int) -> Indices:
        """Return the slots of a rank's pieces that the budget lets change."""
        slots = np.array(self.state.slots_on_rank[rank], dtype=np.int64)
        if self.budget is not None and self.budget.changeable is not None and len(slots):
            slots = slots[self.budget.changeable[self.state.piece_unit[slots]]]
        return slots

    def _sample(self, values: Indices, size: int) -> Indices:
        """Return the values, or `size` of them at random if there are more."""
        return values if len(values) <= size else self.rng.choice(values, size, replace=False)


class Neighborhood(StateMoves):
    """The best few transfers and swaps of a state's column pieces."""

    def transfers(self, rank: int, objective: SmoothObjective) -> list[Move]:
        """Return moves of parts of pieces, or of whole ones, to other ranks."""
        state, problem = self.state, self.problem
        slots, others = self._changeable_slots(rank), self._candidate_ranks(rank)
        if not len(slots) or not len(others):
            return []
        # M rows, one for each part of each piece; B columns, one for each other rank.
        parts = self._parts(slots)
        moved = problem.first_shape[parts.unit] + parts.width - 1
        is_whole = parts.shape - parts.width < problem.first_shape[parts.unit]
        change_here = self._change_at_source(rank, parts, is_whole, objective)
        load_there = state.load[others][None] + problem.load[moved][:, None]
        load_there += problem.crowding_load(
            problem.demand[moved][:, None], state.demand[others][None]
        )
        there = objective.powers_of(load_there)
        gains = (there - objective.powers[others]) @ objective.slope
        # The change at the source does not depend on the rank that gets the part.
        gains += (change_here + problem.shared_ms[moved])[:, None]
        fits = problem.size_bytes[moved][:, None] <= state.free_bytes[others]
        if not self.splits:  # a part that leaves something behind adds a piece
            fits &= is_whole[:, None]
        if self.budget is not None and self.budget.max_bytes is not None:
            fits &= (problem.size_bytes[moved] <= self.budget.max_bytes[parts.unit])[:, None]
        held = state.steps[parts.unit[:, None], others]  # [M, B]
        self._merge_with_held(parts, held, others, change_here, objective, gains, fits)
        if objective.has_hosts:
            gains += self._host_gains(objective, rank, others, problem.host_load(moved)[:, None])
        fits &= self._allowed(parts.unit, others)
        # Moves that do not fit stay in the arrays as the worst of all.
        gains[~fits] = np.inf
        moves = []
        for flat in _lowest(gains):
            m, b = divmod(flat, len(others))  # row and column of a flat index
            unit, width = int(parts.unit[m]), int(parts.width[m])
            stays = int(parts.shape[m]) - int(problem.first_shape[unit]) + 1 - width
            there_width = width + int(held[m, b])
            edits = [SetWidth(unit, rank, stays), SetWidth(unit, int(others[b]), there_width)]
            moves.append(Move(float(gains[m, b]), edits))
        return moves

    def swaps(self, rank: int, objective: SmoothObjective) -> list[Move]:
        """Return moves that exchange a piece of the rank for a piece of another rank."""
        state, problem = self.state, self.problem
        slots = self._changeable_slots(rank)
        other_slots = [self._changeable_slots(int(r)) for r in self._candidate_ranks(rank)]
        others = np.concatenate([np.array([], dtype=np.int64), *other_slots])
        if not len(slots) or not len(others):
            return []
        slots = self._sample(slots, MAX_PIECES)
        others = self._sample(others, MAX_OTHER_PIECES)
        shape, other_shape = state.piece_shape[slots], state.piece_shape[others]
        other_rank = state.piece_rank[others]
        # [M, B, L]: what the other rank gets more than it gives away
        load = problem.load[shape][:, None] - problem.load[other_shape][None]
        load_here, load_there = state.load[rank] - load, state.load[other_rank] + load
        if problem.has_crowding:
            mine, theirs = problem.demand[shape][:, None], problem.demand[other_shape][None]
            rest = state.demand[rank] - mine
            load_here += problem.crowding_load(theirs, rest) - problem.crowding_load(mine, rest)
            rest = state.demand[other_rank][None] - theirs
            load_there += problem.crowding_load(mine, rest) - problem.crowding_load(theirs, rest)
        here = objective.powers_of(load_here) - objective.powers[rank]
        there = objective.powers_of(load_there) - objective.powers[other_rank]
        # To first order: by how much the sums of powers change, times the norms' slopes.
        gains = (here + there) @ objective.slope
        if objective.has_hosts:
            moved = problem.host_load(shape)[:, None] - problem.host_load(other_shape)[None]
            gains += self._host_gains(objective, rank, other_rank, moved)
        gains[~self._swap_fits(rank, slots, others)] = np.inf
        moves = []
        for flat in _lowest(gains):
            m, b = divmod(flat, len(others))
            moves.append(Move(float(gains[m, b]), self._swap_edits(int(slots[m]), int(others[b]))))
        return moves

    def _candidate_ranks(self, rank: int) -> Indices:
        """Return the other ranks with which moves are tried."""
        world_size = self.problem.world_size
        if world_size <= MANY_RANKS:
            return np.delete(np.arange(world_size), rank)
        # Moves to full ranks seldom pay; random ranks are for moves that balance another load.
        total = self.state.load.sum(axis=1)
        least = np.argpartition(total, NUM_LEAST_LOADED)[:NUM_LEAST_LOADED]
        chosen = np.union1d(least, self.rng.integers(world_size, size=NUM_RANDOM_RANKS))
        return chosen[chosen != rank]

    def _parts(self, slots: Indices) -> _Parts:
        """Return all parts that are tried of the pieces in these slots."""
        state = self.state
        widths = state.piece_shape[slots] - self.problem.first_shape[state.piece_unit[slots]] + 1
        sizes = [_part_widths(width) for width in widths.tolist()]
        slot = np.repeat(slots, [len(parts) for parts in sizes])
        return _Parts(state.piece_unit[slot], state.piece_shape[slot], np.concatenate(sizes))

    def _change_at_source(
        self, rank: int, parts: _Parts, is_whole: Mask, objective: SmoothObjective
    ) -> Floats:
        """Return [M], by how much the objective changes if a rank loses a part."""
        problem = self.problem
        # A unit's shapes are consecutive. Where the whole piece moves, the index is that of another
        # unit's shape, which `where` then ignores.
        kept = parts.shape - parts.width
        kept_load = np.where(is_whole[:, None], 0.0, problem.load[kept])
        kept_shared_ms = np.where(is_whole, 0.0, problem.shared_ms[kept])
        load = self.state.load[rank] + kept_load - problem.load[parts.shape]
        if problem.has_crowding:
            whole = problem.demand[parts.shape]
            rest = self.state.demand[rank] - whole
            kept_demand = np.where(is_whole[:, None], 0.0, problem.demand[kept])
            load += problem.crowding_load(kept_demand, rest) - problem.crowding_load(whole, rest)
        change = (objective.powers_of(load) - objective.powers[rank]) @ objective.slope
        change += kept_shared_ms - problem.shared_ms[parts.shape]
        return change

    def _merge_with_held(
        self,
        parts: _Parts,
        held: Indices,
        others: Indices,
        change_here: Floats,
        objective: SmoothObjective,
        gains: Floats,
        fits: Mask,
    ) -> None:
        """Correct gains and fits [M, B] where the other rank holds a piece of the unit.

        The part and that piece become one, which costs less than two.

        Args:
            held: [M, B], steps of those pieces; 0 where there is none.
        """
        state, problem = self.state, self.problem
        m, b = np.nonzero(held)
        if not len(m):
            return
        other = others[b]
        before = problem.first_shape[parts.unit[m]] + held[m, b] - 1
        after = before + parts.width[m]  # the shapes of a unit are consecutive
        load = state.load[other] + problem.load[after] - problem.load[before]
        if problem.has_crowding:
            rest = state.demand[other] - problem.demand[before]
            load += problem.crowding_load(problem.demand[after], rest)
            load -= problem.crowding_load(problem.demand[before], rest)
        change = (objective.powers_of(load) - objective.powers[other]) @ objective.slope
        change += problem.shared_ms[after] - problem.shared_ms[before]
        gains[m, b] = change_here[m] + change
        added_bytes = problem.size_bytes[after] - problem.size_bytes[before]
        fits[m, b] = problem.possible[after] & (added_bytes <= state.free_bytes[other])

    def _swap_fits(self, rank: int, slots: Indices, others: Indices) -> Mask:
        """Return [M, B], whether pieces of the rank and of others may change places."""
        state, problem = self.state, self.problem
        unit, other_unit = state.piece_unit[slots], state.piece_unit[others]
        bytes_here = problem.size_bytes[state.piece_shape[slots]]
        bytes_there = problem.size_bytes[state.piece_shape[others]]
        other_rank = state.piece_rank[others]
        # [M, B], bytes that the other rank gets more than it gives; this rank gets the opposite.
        added = bytes_here[:, None] - bytes_there[None]
        fits: Mask = (added <= state.free_bytes[other_rank]) & (-added <= state.free_bytes[rank])
        # Pieces of one unit would have to merge, which transfers do.
        fits &= (state.steps[unit[:, None], other_rank] == 0) & (state.steps[other_unit, rank] == 0)
        if problem.restricts_ranks:
            fits &= self._allowed(unit, other_rank)
            fits &= self._allowed(other_unit, np.array([rank])).T
        if self.budget is not None and self.budget.max_bytes is not None:
            fits &= (bytes_here <= self.budget.max_bytes[unit])[:, None]
            fits &= bytes_there <= self.budget.max_bytes[other_unit]
        return fits

    def _swap_edits(self, slot: int, other_slot: int) -> list[Edit]:
        state, first_shape = self.state, self.problem.first_shape
        (unit, rank, width), (other_unit, other_rank, other_width) = (
            (
                int(state.piece_unit[s]),
                int(state.piece_rank[s]),
                int(state.piece_shape[s]) - int(first_shape[state.piece_unit[s]]) + 1,
            )
            for s in (slot, other_slot)
        )
        # Both are taken away first: a unit may have only one piece on a rank.
        return [
            SetWidth(unit, rank, 0),
            SetWidth(other_unit, other_rank, 0),
            SetWidth(unit, other_rank, width),
            SetWidth(other_unit, rank, other_width),
        ]

    def _host_gains(
        self, objective: SmoothObjective, rank: int, others: Indices, moved: Floats
    ) -> Floats:
        """Return [M, B], the gains from host loads [M, 1 or B] that move to others' hosts."""
        state = self.state
        per_host = self.problem.hosts.ranks_per_host
        here, there = rank // per_host, others // per_host
        scale, powers = objective.host_scale, objective.host_powers
        lost = objective.power((state.host_load[here] - moved) / scale)
        gained = objective.power((state.host_load[there] + moved) / scale)
        # Within one host nothing changes, although both terms would count the move.
        change = lost - powers[here] + gained - powers[there]
        return np.where(here == there, 0.0, change * objective.host_slope)

    def _allowed(self, units: Indices, ranks: Indices) -> Mask:
        """Return [M, B], whether constraints let units be on ranks; [1, B] if there are none."""
        if not self.problem.restricts_ranks:
            return np.ones((1, len(ranks)), dtype=bool)
        # Several moves may belong to one unit, so each unit is looked up once.
        allowed = {unit: self.state.allowed_ranks(unit)[ranks] for unit in set(units.tolist())}
        return np.array([allowed[unit] for unit in units.tolist()])


@functools.cache
def _part_widths(width: int) -> Indices:
    """Return the widths of a piece's parts that are tried; the last one is the whole piece."""
    return np.unique(np.linspace(1, width, min(width, MAX_PARTS)).round().astype(np.int64))


def _lowest(gains: Floats) -> list[int]:
    """Return the flat indices of the lowest few."""
    # `argpartition` finds them in linear time, in no order; the descent sorts these few.
    flat = gains.ravel()
    if len(flat) <= NUM_BEST:
        return list(range(len(flat)))
    return [int(i) for i in np.argpartition(flat, NUM_BEST)[:NUM_BEST]]
