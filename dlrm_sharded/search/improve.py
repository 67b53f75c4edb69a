"""Better plans by small changes: parts of tables moved, exchanged, split, merged, cut into rows.

The objective is a maximum over ranks, which most changes leave as it is. So the search descends a
smooth stand-in, the 128-norm of the ranks' loads, for which every full rank counts. A change of two
ranks changes two terms of a sum: all changes that take load from one rank are priced in one batch,
by what shapes cost on an ordinary rank, and the best few are tried with exact loads.

Letters: K changes, B other ranks, J other pieces, L loads, W ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.cost.shapes import Indices
from dlrm_sharded.search.construct import ANY_HOST, Option, may_hold, options
from dlrm_sharded.search.state import COLUMNS, ROWS, State, by_host

DOUBLINGS = 7
"""The norm's exponent is 2 to this power."""

MAX_PARTS = 8
"""Sizes tried of what is moved from a piece."""

MANY_RANKS, LEAST_LOADED, AT_RANDOM = 128, 32, 16
"""Of more than so many ranks, changes are tried with the least loaded ones and some others."""

NUM_TRIED, NUM_ROW_CUTS, MAX_ROW_UNITS = 3, 2, 16

NUM_COSTLIEST, NUM_OPTIONS, KEEP_CUTS = 3, 6, 0.4
"""A rebuild cuts one of so many units in one of so many ways; none at all in this share."""
TOLERANCE = 1e-7

Step = tuple[int, int, int]
"""Unit, rank and its new width there; rank -1 for a new mode."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Until when a search may go on."""

    deadline: float

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.deadline


class _Potential:
    """The norms of a state's loads, and the slopes of their sum."""

    def __init__(self, state: State) -> None:
        exponent = 2.0**DOUBLINGS
        self.scale = np.maximum(state.load.max(axis=0), 1e-12)
        self.powers = self.of_loads(state.load)
        sums = np.maximum(self.powers.sum(axis=0), 1e-300)
        norms = self.scale * sums ** (1.0 / exponent)
        self.slope = norms / sums / exponent
        self.value = float(norms.sum()) + state.shared_ms
        self.has_hosts = bool(state.num_hosts > 1 and state.host_load.any())
        if self.has_hosts:
            self.host_scale = float(state.host_load.max())
            self.host_powers = self.power(state.host_load / self.host_scale)
            norm = self.host_scale * self.host_powers.sum() ** (1.0 / exponent)
            self.host_slope = float(norm / self.host_powers.sum() / exponent)
            self.value += float(norm)

    def of_loads(self, load: Floats) -> Floats:
        return self.power(load / self.scale)

    def power(self, values: Floats) -> Floats:
        powers = values
        for _ in range(DOUBLINGS):
            powers = powers * powers
        return powers

    def norms(self, power_sums: Floats) -> Floats:
        """[...], of sums [..., L]."""
        total: Floats = (self.scale * power_sums ** (2.0**-DOUBLINGS)).sum(axis=-1)
        return total


class Limits(Protocol):
    """What of a state may change."""

    def changeable(self) -> NDArray[np.bool_] | None:
        """[U], units that may; None for all."""

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
        self._rng = rng
        self._clock = clock
        self._splits = splits
        self._within = within
        self._known_options: dict[int, list[Option]] = {}
        self._changeable = within.changeable() if within else None

    def descend(self, max_stuck: int = MANY_RANKS) -> None:
        """Take the best change of the fullest rank that has one, until none has.

        Args:
            max_stuck: ranks without one, after which no more are looked at.
        """
        stuck: set[int] = set()
        changed = False
        while not self._clock.is_over:
            potential = _Potential(self._state)
            rank = self._fullest(potential, stuck) if len(stuck) < max_stuck else None
            if rank is None:
                changed = changed or self._try(self._row_joins(potential), potential)
                if not changed:
                    return
                stuck.clear()
                changed = False
            elif self._improve(rank, potential):
                changed = True
            else:
                stuck.add(rank)

    def rebuild(self) -> bool:
        """Take all pieces from the fullest rank and a few others, and place them anew.

        One of the costliest tables of the fullest rank may be cut in another way. False where that
        could not be done within memory and limits; the state may have changed then.
        """
        state, rng = self._state, self._rng
        potential = _Potential(state)
        weight = (potential.powers * potential.slope).sum(axis=1)
        fullest = int(weight.argmax())
        ranks = {fullest, int(state.load.sum(axis=1).argmin())}
        ranks.update(rng.integers(state.problem.world_size, size=rng.integers(1, 4)).tolist())
        pieces: list[tuple[int, int]] = []
        if self._splits:
            pieces += self._recut(fullest)
        for rank in sorted(ranks):
            for slot in self._slots(rank).tolist():
                unit = int(state.piece_unit[slot])
                pieces.append((unit, state.widths[unit][rank]))
                state.set_width(unit, rank, 0)
        state.refresh()
        return self._insert(pieces)

    def _recut(self, rank: int) -> list[tuple[int, int]]:
        """Take one of the costliest units of a rank from everywhere; its pieces in another cut."""
        state, problem, rng = self._state, self._state.problem, self._rng
        slots = self._slots(rank)
        work = problem.work_ms(problem.load[state.piece_shape[slots]])
        costliest = slots[np.argsort(-work, kind="stable")[:NUM_COSTLIEST]]
        units = [*state.piece_unit[costliest].tolist()]
        units += rng.permutation(np.flatnonzero(state.mode != COLUMNS))[:1].tolist()
        units = [u for u in units if problem.num_steps[u] > 1 or problem.rows.possible[u]]
        if not units or rng.random() < KEEP_CUTS:
            return []
        unit = int(units[rng.integers(len(units))])
        found = self._options(unit)
        if not found:
            return []
        cut = found[int(rng.integers(len(found)))].cut
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
        shape = np.array([problem.first[unit] + width - 1 for unit, width in pieces])
        work = problem.work_ms(problem.load[shape]) * self._rng.uniform(0.8, 1.2, len(pieces))
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

    def _fullest(self, potential: _Potential, stuck: set[int]) -> int | None:
        weight = (potential.powers * potential.slope).sum(axis=1)
        if potential.has_hosts:
            per_host = self._state.problem.hosts.ranks_per_host
            weight += np.repeat(potential.host_powers * potential.host_slope, per_host) / per_host
        least = 1e-3 * weight.max()
        for rank in np.argsort(-weight, kind="stable")[: 4 + len(stuck)].tolist():
            if rank not in stuck and weight[rank] >= least:
                return int(rank)
        return None

    def _improve(self, rank: int, potential: _Potential) -> bool:
        found = [*self._transfers(rank, potential), *self._swaps(rank, potential)]
        return self._try(found, potential) or self._try(self._row_cuts(rank, potential), potential)

    def _try(self, found: list[tuple[float, list[Step]]], potential: _Potential) -> bool:
        """Make the first of the best changes that keeps what it promises."""
        state = self._state
        found.sort(key=lambda change: change[0])
        for gain, steps in found[:NUM_TRIED]:
            if gain >= -TOLERANCE * potential.value:
                return False
            mark = len(state.log)
            for step in steps:
                self._apply(step)
            state.refresh()
            after = _Potential(state).value
            if after < potential.value * (1 - TOLERANCE) and self._accept(steps):
                return True
            state.undo(mark)
        return False

    def _accept(self, steps: list[Step]) -> bool:
        if self._within is None:
            return True
        accepted = self._within.accept({unit for unit, _, _ in steps})
        self._changeable = self._within.changeable()
        return accepted

    def _apply(self, step: Step) -> None:
        unit, rank, value = step
        if rank < 0:
            self._state.set_mode(unit, value)
        else:
            self._state.set_width(unit, rank, value)

    def _fit(self, steps: list[Step]) -> bool:
        """Whether ranks have room for new widths, and may have them."""
        state, problem = self._state, self._state.problem
        need: dict[int, int] = {}
        for unit, rank, width in steps:
            before = state.widths[unit].get(rank, 0)
            first = int(problem.first[unit])
            size = int(problem.size_bytes[first + width - 1]) if width else 0
            size -= int(problem.size_bytes[first + before - 1]) if before else 0
            need[rank] = need.get(rank, 0) + size
            if width and not before and not may_hold(state, unit)[rank]:
                return False
        return all(state.free_bytes[rank] >= size for rank, size in need.items())

    def _slots(self, rank: int) -> Indices:
        """Pieces of a rank that may be changed."""
        slots = np.array(self._state.on_rank[rank], dtype=np.int64)
        if self._changeable is not None and len(slots):
            slots = slots[self._changeable[self._state.piece_unit[slots]]]
        return slots

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

    def _transfers(self, rank: int, potential: _Potential) -> list[tuple[float, list[Step]]]:
        """Parts of pieces, or whole ones, to other ranks."""
        state, problem = self._state, self._state.problem
        slots, others = self._slots(rank), self._others(rank)
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

    def _swaps(self, rank: int, potential: _Potential) -> list[tuple[float, list[Step]]]:
        """Pieces exchanged for those of other ranks."""
        state, problem = self._state, self._state.problem
        slots = self._slots(rank)
        others = np.concatenate(
            [np.array([], dtype=np.int64)]
            + [self._slots(int(other)) for other in self._others(rank)]
        )
        if not len(slots) or not len(others):
            return []
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
        gains[~fits] = np.inf
        found = []
        for flat in _lowest(gains):
            k, j = divmod(flat, len(others))
            steps = self._swap_steps(int(slots[k]), int(others[j]))
            found.append((float(gains[k, j]), steps))
        return found

    def _swap_steps(self, slot: int, other: int) -> list[Step]:
        """Empty where one of the units is on both ranks."""
        state, first = self._state, self._state.problem.first
        units = int(state.piece_unit[slot]), int(state.piece_unit[other])
        ranks = int(state.piece_rank[slot]), int(state.piece_rank[other])
        widths = [
            int(state.piece_shape[s]) - int(first[state.piece_unit[s]]) + 1 for s in (slot, other)
        ]
        if ranks[1] in state.widths[units[0]] or ranks[0] in state.widths[units[1]]:
            return []
        return [
            (units[0], ranks[0], 0),
            (units[1], ranks[1], 0),
            (units[0], ranks[1], widths[0]),
            (units[1], ranks[0], widths[1]),
        ]

    def _host_gains(
        self, potential: _Potential, rank: int, others: Indices, moved: Floats
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

    def _row_cuts(self, rank: int, potential: _Potential) -> list[tuple[float, list[Step]]]:
        """The costliest units of a rank cut into row blocks, on all ranks or on those of a host."""
        state, problem = self._state, self._state.problem
        slots = self._slots(rank) if self._splits else self._slots(rank)[:0]
        work = problem.work_ms(problem.load[state.piece_shape[slots]])
        costliest = slots[np.argsort(-work, kind="stable")[:NUM_ROW_CUTS]]
        units = [
            u
            for u in state.piece_unit[costliest].tolist()
            if problem.rows.possible[u]
            or (problem.host_rows is not None and problem.host_rows.possible[u])
        ]
        found: list[tuple[float, list[Step]]] = []
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

    def _after_cuts(
        self, unit: int, load: Floats, free: Indices, potential: _Potential
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
        fits = by_host(free >= blocks.size_bytes[unit], num_hosts).all(axis=1)
        fits &= by_host(may_hold(state, unit), num_hosts).all(axis=1)
        if fits.any():
            host = int(np.where(fits, values, np.inf).argmin())
            yield host, float(values[host]) + float(blocks.shared_ms[unit]) + host_ms

    def _row_joins(self, potential: _Potential) -> list[tuple[float, list[Step]]]:
        """Units in row blocks put together again, on the best rank for each."""
        state, problem = self._state, self._state.problem
        units = np.flatnonzero(state.mode != COLUMNS)
        if self._changeable is not None:
            units = units[self._changeable[units]]
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
            powers = potential.of_loads(load)
            after = potential.of_loads(load + problem.load[whole])
            values = potential.norms(powers.sum(axis=0) - powers + after)
            rank = int(np.where(fits, values, np.inf).argmin())
            shared_ms = float(problem.shared_ms[whole] - blocks.shared_ms[unit])
            if (state.mode == mode).sum() == 1:
                if mode == ROWS:
                    shared_ms -= blocks.fixed_ms
                else:
                    load[ranks] -= blocks.fixed_ms * problem.weights.own
            before = float(potential.norms(potential.powers.sum(axis=0)))
            gain = float(values[rank]) - before + shared_ms
            width = int(problem.num_steps[unit])
            found.append((gain, [(unit, -1, COLUMNS), (unit, rank, width)]))
        return found


@functools.cache
def _parts(width: int) -> Indices:
    """Sizes of what is moved from a piece, in steps: up to `MAX_PARTS`, the last one all of it."""
    return np.unique(np.linspace(1, width, min(width, MAX_PARTS)).round().astype(np.int64))


def _lowest(gains: Floats) -> list[int]:
    """The flat places of the best few."""
    flat = gains.ravel()
    if len(flat) <= NUM_TRIED:
        return list(range(len(flat)))
    return [int(i) for i in np.argpartition(flat, NUM_TRIED)[:NUM_TRIED]]
