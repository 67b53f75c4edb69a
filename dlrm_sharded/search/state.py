"""A plan in the making: the places of all pieces, and their cost, kept up to date.

A state changes by edits only, and every edit can be undone.

Letters: U units, L loads, W ranks, H hosts, P slots, S separated sets, G groups, M modules; see
`problem.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlrm_sharded.cost.workload import Indices, Mask
from dlrm_sharded.search.problem import Demand, Problem, by_group

COLUMNS = -1
"""Entry of `State.group` for units in column pieces, that is, not in row blocks on a group."""

FREE_SLOT = -1
"""Entry of `State.piece_rank` for a slot that holds no piece."""


class SetWidth(NamedTuple):
    """Edit: give a rank this many steps of a unit's columns, 0 for none."""

    unit: int
    rank: int
    width: int


class SetGroup(NamedTuple):
    """Edit: put a unit in row blocks on a group, or back to `COLUMNS`."""

    unit: int
    group: int


Edit = SetWidth | SetGroup


class State:
    """Pieces on ranks.

    A unit has at most one column piece on a rank, because two cost more than one of equal columns.

    Attributes:
        widths: steps of each unit by rank.
        steps: [U, W], the same as an array.
        group: [U], index into `Problem.groups`, or `COLUMNS`.
        piece_unit, piece_shape, piece_rank: [P], the column piece in each slot.
        slots_on_rank: slots of each rank's column pieces.
        free_bytes: [W], memory of each rank that is left.
        demand: [W, D], sums over the pieces and blocks of each rank.
        load: [W, L], in ms.
        host_load: [H], time that the all-to-alls take because of a host's bytes if it has most.
        shared_ms: time that every rank pays.
        num_in_group: [G, M], units of each module in row blocks on each of `Problem.groups`.
        num_in_all_to_all: [M], column pieces and row blocks of each module whose vectors all ranks
            exchange in one all-to-all.
        separated_count: [S, W], pieces of the units of a separated set on each rank.
        log: edits that would undo those made so far, the latest last.
    """

    def __init__(self, problem: Problem) -> None:
        world_size, num_units = problem.world_size, problem.num_units
        self.problem = problem
        self.widths: list[dict[int, int]] = [{} for _ in range(num_units)]
        self.steps = np.zeros((num_units, world_size), dtype=np.int64)
        self.group = np.full(num_units, COLUMNS)
        # Arrays of pieces begin with two pieces per unit, and double when they are full.
        self.piece_unit = np.zeros(2 * num_units, dtype=np.int64)
        self.piece_shape = np.zeros(2 * num_units, dtype=np.int64)
        self.piece_rank = np.full(2 * num_units, FREE_SLOT)
        self.slots_on_rank: list[list[int]] = [[] for _ in range(world_size)]
        self.free_bytes = problem.capacity_bytes.copy()
        self.demand = np.zeros((world_size, problem.demand.shape[1]))
        self.load = np.zeros((world_size, problem.load.shape[1]))
        self.num_hosts = world_size // problem.hosts.ranks_per_host
        self.host_load = np.zeros(self.num_hosts)
        self.shared_ms = 0.0
        self.separated_count = np.zeros((problem.separated.shape[1], world_size), dtype=np.int64)
        self.num_in_group = np.zeros((len(problem.groups), problem.num_owners), dtype=np.int64)
        self.log: list[Edit] = []
        self._num_columns = np.zeros((world_size, problem.num_owners))
        self.num_in_all_to_all = [0] * problem.num_owners
        self._slot: list[dict[int, int]] = [{} for _ in range(num_units)]
        self._free_slots = list(range(2 * num_units))[::-1]  # taken from the end, 0 first
        self._touched: set[int] = set()

    def copy_for(self, problem: Problem) -> State:
        """Return a state with the same pieces under other costs of the problem.

        Units that could not be split before, and are whole, may have more steps there.
        """
        state = State(problem)
        factors = problem.num_steps // self.problem.num_steps
        for unit, (widths, factor) in enumerate(zip(self.widths, factors.tolist(), strict=True)):
            state.set_group(unit, int(self.group[unit]))
            for rank, width in widths.items():
                state.set_width(unit, rank, width * factor)
        state.settle()
        return state

    @property
    def objective_ms(self) -> float:
        """The objective, which the search minimizes."""
        largest = self.load.max(axis=0)
        return float(largest.sum()) + float(self.host_load.max()) + self.shared_ms

    def allowed_ranks(self, unit: int) -> Mask:
        """Return [W], ranks that the constraints allow for one more piece of the unit."""
        problem = self.problem
        allowed = np.ones(problem.world_size, dtype=bool)
        if problem.allowed is not None:
            allowed &= problem.allowed[unit]
        sets = problem.separated[unit]
        if sets.any():
            # Pieces of the unit itself do not keep it away from a rank.
            others = self.separated_count[sets].copy()
            others[:, list(self.widths[unit])] -= 1
            allowed &= ~(others > 0).any(axis=0)
        return allowed

    def costliest_units(self, slots: Indices, number: int) -> list[int]:
        """Return the units of the costliest pieces in some slots [n], by processing time."""
        processing_ms = self.problem.processing_ms(self.problem.load[self.piece_shape[slots]])
        costliest = slots[np.argsort(-processing_ms, kind="stable")[:number]]
        units: list[int] = self.piece_unit[costliest].tolist()
        return units

    def apply(self, edit: Edit) -> None:
        """Make an edit."""
        if isinstance(edit, SetGroup):
            self.set_group(*edit)
        else:
            self.set_width(*edit)

    def set_width(self, unit: int, rank: int, width: int) -> None:
        """Make the edit `SetWidth`."""
        before = self.widths[unit].get(rank, 0)
        if before == width:
            return
        self.log.append(SetWidth(unit, rank, before))
        self._set_width(unit, rank, width)

    def remove_columns(self, unit: int) -> None:
        """Remove a unit's column pieces from all ranks."""
        for rank in list(self.widths[unit]):
            self.set_width(unit, rank, 0)

    def set_group(self, unit: int, group: int) -> None:
        """Make the edit `SetGroup`; the unit must have no column pieces."""
        assert not self.widths[unit]
        if self.group[unit] != group:
            self.log.append(SetGroup(unit, int(self.group[unit])))
            self._set_group(unit, group)

    def undo(self, log_length: int = 0) -> None:
        """Undo all edits made since the log had this length."""
        while len(self.log) > log_length:
            edit = self.log.pop()  # made without a new entry in the log
            if isinstance(edit, SetGroup):
                self._set_group(*edit)
            else:
                self._set_width(*edit)
        self.refresh()

    def settle(self) -> None:
        """Make the edits made so far final."""
        self.refresh()
        self.log.clear()

    def refresh(self) -> None:
        """Bring the loads of edited ranks up to date."""
        if not self._touched:
            return
        ranks = np.fromiter(self._touched, dtype=np.int64, count=len(self._touched))
        self._touched.clear()
        # Edits only add up demands; times are computed here, once for all edits of a move.
        problem, demand = self.problem, self.demand[ranks]
        # For each module, a rank launches a lookup for its column pieces, and one for each kind of
        # row blocks.
        num_of_kind = [
            np.count_nonzero(
                self.num_in_group[blocks.groups.start + ranks // blocks.group_size], axis=1
            )
            for blocks in problem.blocks
        ]
        num_lookups = np.count_nonzero(self._num_columns[ranks], axis=1).astype(np.float64)
        for number in num_of_kind:
            num_lookups += number
        # Computation is not a sum over pieces: unit costs rise with what all of them read together.
        compute_ms = problem.costed.compute.times_ms(demand[:, Demand.VECTOR], num_lookups)
        load = problem.weights.loads(compute_ms, demand[:, Demand.VOLUME])
        load += demand[:, Demand.SURCHARGE]
        for blocks, number in zip(problem.blocks, num_of_kind, strict=True):
            if not blocks.is_global:
                load += number[:, None] * blocks.fixed_load
        self.load[ranks] = load
        # Few ranks changed, but sums over hosts are cheaper to recompute than to keep.
        if self.num_hosts > 1 and problem.exchange_costs.busiest_host_byte_ms > 0:
            volume = by_group(self.demand[:, Demand.VOLUME], problem.hosts.ranks_per_host)
            self.host_load = problem.exchange_costs.busiest_host_byte_ms * volume.sum(axis=1)

    def _set_width(self, unit: int, rank: int, width: int) -> None:
        problem = self.problem
        slot, before = self._slot[unit].get(rank), self.widths[unit].get(rank, 0)
        self.steps[unit, rank] = width
        if slot is not None:  # the piece there is taken away, and comes back in its new width
            old = problem.shape(unit, before)
            self.demand[rank] -= problem.demand[old]
            self.free_bytes[rank] += problem.size_bytes[old]
            self.shared_ms -= float(problem.shared_ms[old])
        if width:
            new = problem.shape(unit, width)
            self.demand[rank] += problem.demand[new]
            self.free_bytes[rank] -= problem.size_bytes[new]
            self.shared_ms += float(problem.shared_ms[new])
            self.widths[unit][rank] = width
            if slot is None:
                slot = self._add_piece(unit, rank)
            self.piece_shape[slot] = new
        elif slot is not None:
            self._remove_piece(unit, rank, slot)
        self._touched.add(rank)

    def _add_piece(self, unit: int, rank: int) -> int:
        slot = self._new_slot()
        self._slot[unit][rank] = slot
        self.slots_on_rank[rank].append(slot)
        self.piece_unit[slot], self.piece_rank[slot] = unit, rank
        self._count_piece(unit, rank, 1)
        return slot

    def _remove_piece(self, unit: int, rank: int, slot: int) -> None:
        self._count_piece(unit, rank, -1)
        del self.widths[unit][rank], self._slot[unit][rank]
        self.slots_on_rank[rank].remove(slot)
        self.piece_rank[slot] = FREE_SLOT
        self._free_slots.append(slot)

    def _count_piece(self, unit: int, rank: int, more: int) -> None:
        for owner in self.problem.owners[unit]:
            self._num_columns[rank, owner] += more
            self._count_in_all_to_all(owner, more)
        if self.separated_count.size:
            self.separated_count[self.problem.separated[unit], rank] += more

    def _set_group(self, unit: int, group: int) -> None:
        owner = self.problem.owners[unit][0]  # units of several tables have column pieces only
        for changed, sign in ((int(self.group[unit]), -1), (group, 1)):
            if changed == COLUMNS:
                continue
            rank_group = self.problem.groups[changed]
            members, blocks = rank_group.members, self.problem.blocks[rank_group.kind]
            self.demand[members] += sign * blocks.demand[unit]
            self.demand[rank_group.ranks[-1]] -= sign * blocks.missing[unit]
            self.free_bytes[members] -= sign * blocks.size_bytes[unit]
            self.shared_ms += sign * float(blocks.shared_ms[unit])
            self.num_in_group[changed, owner] += sign
            if not blocks.is_global:
                self._count_in_all_to_all(owner, sign)
            elif self.num_in_group[changed, owner] == (1 if sign > 0 else 0):
                self.shared_ms += sign * blocks.fixed_ms
            self._touched.update(rank_group.ranks)
        self.group[unit] = group

    def _count_in_all_to_all(self, owner: int, more: int) -> None:
        """Count a module's pieces that exchange vectors; without any it has no all-to-alls."""
        self.num_in_all_to_all[owner] += more
        # Reached by counting up from 0, or by counting down to it.
        if self.num_in_all_to_all[owner] == (1 if more > 0 else 0):
            self.shared_ms += more * self.problem.exchange_costs.fixed_ms

    def _new_slot(self) -> int:
        if not self._free_slots:
            size = len(self.piece_unit)
            zeros = np.zeros(size, dtype=np.int64)
            self.piece_unit = np.concatenate([self.piece_unit, zeros])
            self.piece_shape = np.concatenate([self.piece_shape, zeros])
            self.piece_rank = np.concatenate([self.piece_rank, zeros + FREE_SLOT])
            self._free_slots = list(range(size, 2 * size))[::-1]
        return self._free_slots.pop()
