"""Small changes of a state, and what each would gain, in batches.

All changes that take load from one rank are priced at once: a change of two ranks changes two terms
of the potential's sums. Shapes have the price here that they have on an ordinary rank; whoever
makes a change sees what it comes to.

Letters: K changes, B other ranks, J other pieces, L loads, W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.cost.shapes import Indices
from dlrm_sharded.search.construct import may_hold
from dlrm_sharded.search.potential import Potential
from dlrm_sharded.search.state import COLUMNS, ROWS, State, by_host

MAX_PARTS = 8
"""Sizes tried of what is moved from a piece."""

MANY_RANKS, LEAST_LOADED, AT_RANDOM = 128, 32, 16
"""Of more than so many ranks, changes are tried with the least loaded ones and some others."""

MANY_PIECES, MANY_OTHER_PIECES = 32, 512
"""Of a rank's pieces, and of all others', for how many exchanges are tried: some at random."""

NUM_BEST, NUM_ROW_CUTS, MAX_ROW_UNITS = 3, 2, 16

Step = tuple[int, int, int]
"""Unit, rank and its new width there; rank -1 for a new mode."""

Change = tuple[float, list[Step]]
"""By how many ms the potential changes, and how it is made."""


class Neighbours:
    """The best few changes of each kind.

    Args:
        splits: whether tables may be cut into more pieces than they are in.

    Attributes:
        changeable: [U], units that may be changed; None for all.
        most_bytes: [U], of a unit that may move at once; None for any.
    """

    def __init__(self, state: State, rng: np.random.Generator, *, splits: bool) -> None:
        self._state = state
        self._rng = rng
        self._splits = splits
        self.changeable: NDArray[np.bool_] | None = None
        self.most_bytes: Floats | None = None

    def transfers(self, rank: int, potential: Potential) -> list[Change]:
        """Parts of pieces, or whole ones, to other ranks."""
        state, problem = self._state, self._state.problem
        slots, others = self.slots(rank), self._others(rank)
        if not len(slots) or not len(others):
            return []
        widths = state.piece_shape[slots] - problem.first[state.piece_unit[slots]] + 1
        parts = [_parts(width) for width in widths.tolist()]
        slot = np.repeat(slots, [len(sizes) for sizes in parts])
        part = np.concatenate(parts)
        unit, shape = state.piece_unit[slot], state.piece_shape[slot]
        moved = problem.first[unit] + part - 1
        stays = shape - part
        is_whole = stays < problem.first[unit]
        kept_load = np.where(is_whole[:, None], 0.0, problem.load[stays])
        kept_shared = np.where(is_whole, 0.0, problem.shared_ms[stays])
        at_rank = state.load[rank] + kept_load - problem.load[shape]
        change = (potential.of_loads(at_rank) - potential.powers[rank]) @ potential.slope
        change += kept_shared - problem.shared_ms[shape]
        there = potential.of_loads(state.load[others][None] + problem.load[moved][:, None])
        gains = (there - potential.powers[others]) @ potential.slope
        gains += (change + problem.shared_ms[moved])[:, None]
        room = state.free_bytes[others]
        fits = problem.size_bytes[moved][:, None] <= room
        if not self._splits:
            fits &= is_whole[:, None]
        if self.most_bytes is not None:
            fits &= (problem.size_bytes[moved] <= self.most_bytes[unit])[:, None]
        # where a rank has a piece of the unit already, the two become one
        merged: dict[tuple[int, int], int] = {}
        place = {int(other): i for i, other in enumerate(others)}
        for k, u in enumerate(unit.tolist()):
            held = state.widths[u]
            if len(held) == 1:
                continue
            for other, width in held.items():
                i = place.get(other)
                if i is None:
                    continue
                before, after = int(problem.first[u]) + width - 1, int(moved[k]) + width
                load = state.load[other] + problem.load[after] - problem.load[before]
                delta = (potential.of_loads(load) - potential.powers[other]) @ potential.slope
                delta += problem.shared_ms[after] - problem.shared_ms[before]
                gains[k, i] = change[k] + delta
                fits[k, i] = problem.size_bytes[after] - problem.size_bytes[before] <= room[i]
                merged[k, i] = width
        if potential.has_hosts:
            gains += self._host_gains(potential, rank, others, problem.host_load[moved][:, None])
        fits &= self._allowed(unit, others)
        gains[~fits] = np.inf
        found = []
        for flat in _lowest(gains):
            k, i = divmod(flat, len(others))
            u, size, left = int(unit[k]), int(part[k]), int(shape[k] - part[k])
            stay = left - int(problem.first[u]) + 1
            steps = [(u, rank, stay), (u, int(others[i]), size + merged.get((k, i), 0))]
            found.append((float(gains[k, i]), steps))
        return found

    def swaps(self, rank: int, potential: Potential) -> list[Change]:
        """Pieces exchanged for those of other ranks."""
        state, problem = self._state, self._state.problem
        slots = self.slots(rank)
        others = np.concatenate(
            [np.array([], dtype=np.int64)]
            + [self.slots(int(other)) for other in self._others(rank)]
        )
        if not len(slots) or not len(others):
            return []
        slots = self._some(slots, MANY_PIECES)
        others = self._some(others, MANY_OTHER_PIECES)
        shape, other_shape = state.piece_shape[slots], state.piece_shape[others]
        unit, other_unit = state.piece_unit[slots], state.piece_unit[others]
        at = state.piece_rank[others]
        more = problem.load[shape][:, None] - problem.load[other_shape][None]
        here = potential.of_loads(state.load[rank] - more) - potential.powers[rank]
        there = potential.of_loads(state.load[at] + more) - potential.powers[at]
        gains = (here + there) @ potential.slope
        if potential.has_hosts:
            moved = problem.host_load[shape][:, None] - problem.host_load[other_shape][None]
            gains += self._host_gains(potential, rank, at, moved)
        size = problem.size_bytes[shape][:, None] - problem.size_bytes[other_shape][None]
        fits = (size <= state.free_bytes[at]) & (-size <= state.free_bytes[rank])
        for k, u in enumerate(unit.tolist()):
            if len(state.widths[u]) > 1:
                fits[k] &= ~np.isin(at, list(state.widths[u]))
        for j, u in enumerate(other_unit.tolist()):
            if rank in state.widths[u]:
                fits[:, j] = False
        if problem.allowed is not None or problem.apart.size:
            fits &= self._allowed(unit, at)
            fits &= self._allowed(other_unit, np.array([rank])).T
        if self.most_bytes is not None:
            fits &= (problem.size_bytes[shape] <= self.most_bytes[unit])[:, None]
            fits &= problem.size_bytes[other_shape] <= self.most_bytes[other_unit]
        gains[~fits] = np.inf
        found = []
        for flat in _lowest(gains):
            k, j = divmod(flat, len(others))
            steps = self._swap_steps(int(slots[k]), int(others[j]))
            found.append((float(gains[k, j]), steps))
        return found

    def row_cuts(self, rank: int, potential: Potential) -> list[Change]:
        """The costliest units of a rank cut into row blocks, on all ranks or on those of a host."""
        state, problem = self._state, self._state.problem
        slots = self.slots(rank) if self._splits else self.slots(rank)[:0]
        work = problem.work_ms(problem.load[state.piece_shape[slots]])
        costliest = slots[np.argsort(-work, kind="stable")[:NUM_ROW_CUTS]]
        units = [
            u
            for u in state.piece_unit[costliest].tolist()
            if problem.rows.possible[u]
            or (problem.host_rows is not None and problem.host_rows.possible[u])
        ]
        found: list[Change] = []
        for unit in units:
            load, free = state.load.copy(), state.free_bytes.copy()
            shared_ms = state.shared_ms
            for other, width in state.widths[unit].items():
                shape = int(problem.first[unit]) + width - 1
                load[other] -= problem.load[shape]
                free[other] += problem.size_bytes[shape]
                shared_ms -= float(problem.shared_ms[shape])
            drop = [(unit, other, 0) for other in state.widths[unit]]
            found += [
                (after + shared_ms - potential.value, [*drop, (unit, -1, mode)])
                for mode, after in self._after_cuts(unit, load, free, potential)
            ]
        return found

    def row_joins(self, potential: Potential) -> list[Change]:
        """Units in row blocks put together again, on the best rank for each."""
        state, problem = self._state, self._state.problem
        units = np.flatnonzero(state.mode != COLUMNS)
        if self.changeable is not None:
            units = units[self.changeable[units]]
        if len(units) > MAX_ROW_UNITS:
            units = self._rng.choice(units, MAX_ROW_UNITS, replace=False)
        found = []
        for unit in units.tolist():
            mode = int(state.mode[unit])
            ranks, blocks = state.ranks_of_mode(mode), state.blocks(mode)
            whole = int(problem.whole[unit])
            load, free = state.load.copy(), state.free_bytes.copy()
            load[ranks] -= blocks.load[unit]
            free[ranks] += blocks.size_bytes[unit]
            fits = (free >= problem.size_bytes[whole]) & may_hold(state, unit)
            if not fits.any():
                continue
            shared_ms = float(problem.shared_ms[whole] - blocks.shared_ms[unit])
            if (state.mode == mode).sum() == 1:
                if mode == ROWS:
                    shared_ms -= blocks.fixed_ms
                else:
                    load[ranks] -= blocks.fixed_ms * problem.weights.own
            powers = potential.of_loads(load)
            after = potential.of_loads(load + problem.load[whole])
            values = potential.norms(powers.sum(axis=0) - powers + after)
            rank = int(np.where(fits, values, np.inf).argmin())
            before = float(potential.norms(potential.powers.sum(axis=0)))
            gain = float(values[rank]) - before + shared_ms
            width = int(problem.num_steps[unit])
            found.append((gain, [(unit, -1, COLUMNS), (unit, rank, width)]))
        return found

    def slots(self, rank: int) -> Indices:
        """Pieces of a rank that may be changed."""
        slots = np.array(self._state.on_rank[rank], dtype=np.int64)
        if self.changeable is not None and len(slots):
            slots = slots[self.changeable[self._state.piece_unit[slots]]]
        return slots

    def _some(self, slots: Indices, most: int) -> Indices:
        return slots if len(slots) <= most else self._rng.choice(slots, most, replace=False)

    def _others(self, rank: int) -> Indices:
        """Ranks that changes are tried with."""
        state = self._state
        world_size = state.problem.world_size
        if world_size <= MANY_RANKS:
            return np.delete(np.arange(world_size), rank)
        total = state.load.sum(axis=1)
        least = np.argpartition(total, LEAST_LOADED)[:LEAST_LOADED]
        chosen = np.union1d(least, self._rng.integers(world_size, size=AT_RANDOM))
        return chosen[chosen != rank]

    def _swap_steps(self, slot: int, other: int) -> list[Step]:
        state, first = self._state, self._state.problem.first
        units = int(state.piece_unit[slot]), int(state.piece_unit[other])
        ranks = int(state.piece_rank[slot]), int(state.piece_rank[other])
        widths = [
            int(state.piece_shape[s]) - int(first[state.piece_unit[s]]) + 1 for s in (slot, other)
        ]
        return [
            (units[0], ranks[0], 0),
            (units[1], ranks[1], 0),
            (units[0], ranks[1], widths[0]),
            (units[1], ranks[0], widths[1]),
        ]

    def _host_gains(
        self, potential: Potential, rank: int, others: Indices, moved: Floats
    ) -> Floats:
        """[K, B], of host loads [K, 1 or B] moved from a rank's host to those of others."""
        state = self._state
        per_host = state.problem.hosts.ranks_per_host
        here, there = rank // per_host, others // per_host
        scale = potential.host_scale
        lost = potential.power((state.host_load[here] - moved) / scale)
        got = potential.power((state.host_load[there] + moved) / scale)
        change = lost - potential.host_powers[here] + got - potential.host_powers[there]
        return np.where(here == there, 0.0, change * potential.host_slope)

    def _allowed(self, unit: Indices, ranks: Indices) -> NDArray[np.bool_]:
        """[K, B], where the constraints let units be."""
        problem = self._state.problem
        if problem.allowed is None and not problem.apart.size:
            return np.ones((1, len(ranks)), dtype=bool)
        of_unit = {u: may_hold(self._state, u)[ranks] for u in set(unit.tolist())}
        return np.array([of_unit[u] for u in unit.tolist()])

    def _after_cuts(
        self, unit: int, load: Floats, free: Indices, potential: Potential
    ) -> Iterator[tuple[int, float]]:
        """Modes of row blocks, and the potential with them, of loads [W, L] without the unit."""
        state, problem = self._state, self._state.problem
        host_ms = 0.0
        if potential.has_hosts:
            host_ms = (
                potential.value
                - state.shared_ms
                - float(potential.norms(potential.powers.sum(axis=0)))
            )
        rows = problem.rows
        if rows.possible[unit] and (free >= rows.size_bytes[unit]).all():
            sums = potential.of_loads(load + rows.load[unit]).sum(axis=0)
            fixed_ms = 0.0 if (state.mode == ROWS).any() else rows.fixed_ms
            shared_ms = float(rows.shared_ms[unit]) + fixed_ms + host_ms
            yield ROWS, float(potential.norms(sums)) + shared_ms
        blocks = problem.host_rows
        if blocks is None or not blocks.possible[unit]:
            return
        num_hosts = state.num_hosts
        before = by_host(potential.of_loads(load), num_hosts).sum(axis=1)
        more = np.repeat(blocks.load[unit][None], num_hosts, axis=0)
        reduces = np.isin(np.arange(num_hosts), state.mode)
        more[~reduces] += blocks.fixed_ms * problem.weights.own
        after = potential.of_loads(load + np.repeat(more, len(load) // num_hosts, axis=0))
        after = by_host(after, num_hosts).sum(axis=1)
        values = potential.norms(before.sum(axis=0) - before + after)
        fits = (by_host(free, num_hosts) >= blocks.size_bytes[unit]).all(axis=1)
        fits &= by_host(may_hold(state, unit), num_hosts).all(axis=1)
        if fits.any():
            host = int(np.where(fits, values, np.inf).argmin())
            yield host, float(values[host]) + float(blocks.shared_ms[unit]) + host_ms


@functools.cache
def _parts(width: int) -> Indices:
    """Sizes of what is moved from a piece, in steps: up to `MAX_PARTS`, the last one all of it."""
    return np.unique(np.linspace(1, width, min(width, MAX_PARTS)).round().astype(np.int64))


def _lowest(gains: Floats) -> list[int]:
    """The flat places of the best few."""
    flat = gains.ravel()
    if len(flat) <= NUM_BEST:
        return list(range(len(flat)))
    return [int(i) for i in np.argpartition(flat, NUM_BEST)[:NUM_BEST]]
