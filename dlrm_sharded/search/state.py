"""A plan in the making: which pieces are where, and what that costs, kept up to date.

Every change is a width of a unit on a rank, or a unit's switch to row blocks and back. All changes
can be undone.

Letters: U units, L loads, W ranks, H hosts; see `problem.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.search.problem import Blocks, Number, Problem

COLUMNS, ROWS = -1, -2
"""Modes of a unit; with a host's number, row blocks on that host's ranks."""

Change = tuple[int, int, int]
"""Unit, rank or -1 for its mode, and the width or mode before."""


class State:
    """Pieces on ranks. A unit has at most one column shard on a rank: more would cost more.

    Attributes:
        widths: of each unit, by rank, in steps.
        mode: [U].
        piece_unit, piece_shape, piece_rank: of column shards, by slot; rank -1 for a free slot.
        on_rank: slots of each rank.
        free_bytes: [W].
        load: [W, L], in ms.
        host_load: [H].
        shared_ms: what every rank pays.
    """

    def __init__(self, problem: Problem) -> None:
        world_size, num_units = problem.world_size, problem.num_units
        self.problem = problem
        self.widths: list[dict[int, int]] = [{} for _ in range(num_units)]
        self.mode = np.full(num_units, COLUMNS)
        self.piece_unit = np.zeros(2 * num_units, dtype=np.int64)
        self.piece_shape = np.zeros(2 * num_units, dtype=np.int64)
        self.piece_rank = np.full(2 * num_units, -1)
        self.on_rank: list[list[int]] = [[] for _ in range(world_size)]
        self.free_bytes = problem.capacity.copy()
        self.load = np.zeros((world_size, problem.load.shape[1]))
        self.num_hosts = world_size // problem.hosts.ranks_per_host
        self.host_load = np.zeros(self.num_hosts)
        self.shared_ms = 0.0
        self.apart_count = np.zeros((problem.apart.shape[1], world_size), dtype=np.int64)
        self._sums = np.zeros((world_size, problem.asks.shape[1]))
        self._num_columns = np.zeros(world_size)
        self._num_exchanged = 0
        self._num_rows = 0
        self._num_host_rows = np.zeros(self.num_hosts)
        self._slot: list[dict[int, int]] = [{} for _ in range(num_units)]
        self._free_slots = list(range(2 * num_units))[::-1]
        self._touched: set[int] = set()
        self.log: list[Change] = []

    def copy_for(self, problem: Problem) -> State:
        """The same pieces, under another pricing of the problem."""
        state = State(problem)
        for unit, widths in enumerate(self.widths):
            state.set_mode(unit, int(self.mode[unit]))
            for rank, width in widths.items():
                state.set_width(unit, rank, width)
        state.refresh()
        state.log.clear()
        return state

    @property
    def objective_ms(self) -> float:
        """What the search minimises: with the margin of pieces."""
        return float(self.load.max(axis=0).sum()) + float(self.host_load.max()) + self.shared_ms

    def ranks_of_mode(self, mode: int) -> slice:
        """Those that hold the row blocks of a unit in a mode."""
        if mode == ROWS:
            return slice(0, self.problem.world_size)
        per_host = self.problem.hosts.ranks_per_host
        return slice(mode * per_host, (mode + 1) * per_host)

    def blocks(self, mode: int) -> Blocks:
        """The row blocks of a mode."""
        blocks = self.problem.rows if mode == ROWS else self.problem.host_rows
        assert blocks is not None
        return blocks

    def set_width(self, unit: int, rank: int, width: int) -> None:
        """Give a rank so many steps of a unit: 0 for none."""
        before = self.widths[unit].get(rank, 0)
        if before == width:
            return
        self.log.append((unit, rank, before))
        self._set_width(unit, rank, width)

    def set_mode(self, unit: int, mode: int) -> None:
        """Cut a unit into row blocks, or go back to columns; it has no width anywhere."""
        assert not self.widths[unit]
        if self.mode[unit] != mode:
            self.log.append((unit, -1, int(self.mode[unit])))
            self._set_mode(unit, mode)

    def undo(self, mark: int = 0) -> None:
        """Take back all changes since the log had the length `mark`."""
        while len(self.log) > mark:
            unit, rank, before = self.log.pop()
            if rank < 0:
                self._set_mode(unit, before)
            else:
                self._set_width(unit, rank, before)
        self.refresh()

    def refresh(self) -> None:
        """Bring the loads of changed ranks up to date."""
        if not self._touched:
            return
        ranks = np.fromiter(self._touched, dtype=np.int64, count=len(self._touched))
        self._touched.clear()
        problem = self.problem
        num_loads = self.load.shape[1]
        hosts = ranks // problem.hosts.ranks_per_host
        num_lookups = (self._num_columns[ranks] > 0).astype(np.float64)
        num_lookups += self._num_rows > 0
        num_lookups += self._num_host_rows[hosts] > 0
        vectors = self._sums[ranks, : -2 - num_loads]
        work = problem.model.compute.times_ms(vectors, num_lookups)
        volume = self._sums[ranks, -2 - num_loads]
        self.load[ranks] = problem.weights.loads(work, volume)
        self.load[ranks] += self._sums[ranks, -num_loads:]
        if problem.host_rows is not None:
            reduces = self._num_host_rows[hosts] > 0
            fixed_ms = problem.host_rows.fixed_ms * problem.weights.own
            self.load[ranks] += reduces[:, None] * fixed_ms
        if self.num_hosts > 1 and problem.prices.busiest_host_byte_ms > 0:
            volume = by_host(self._sums[:, -2 - num_loads], self.num_hosts).sum(axis=1)
            self.host_load = problem.prices.busiest_host_byte_ms * volume

    def _set_width(self, unit: int, rank: int, width: int) -> None:
        problem = self.problem
        first = int(problem.first[unit])
        slot = self._slot[unit].get(rank)
        if slot is not None:
            old = first + self.widths[unit][rank] - 1
            self._sums[rank] -= problem.asks[old]
            self.free_bytes[rank] += problem.size_bytes[old]
            self.shared_ms -= float(problem.shared_ms[old])
        if width:
            new = first + width - 1
            self._sums[rank] += problem.asks[new]
            self.free_bytes[rank] -= problem.size_bytes[new]
            self.shared_ms += float(problem.shared_ms[new])
            self.widths[unit][rank] = width
            if slot is None:
                slot = self._new_slot()
                self._slot[unit][rank] = slot
                self.on_rank[rank].append(slot)
                self.piece_unit[slot], self.piece_rank[slot] = unit, rank
                self._num_columns[rank] += 1
                self._count_exchanged(1)
                if self.apart_count.size:
                    self.apart_count[problem.apart[unit], rank] += 1
            self.piece_shape[slot] = new
        elif slot is not None:
            del self.widths[unit][rank], self._slot[unit][rank]
            self.on_rank[rank].remove(slot)
            self.piece_rank[slot] = -1
            self._free_slots.append(slot)
            self._num_columns[rank] -= 1
            self._count_exchanged(-1)
            if self.apart_count.size:
                self.apart_count[problem.apart[unit], rank] -= 1
        self._touched.add(rank)

    def _set_mode(self, unit: int, mode: int) -> None:
        before = int(self.mode[unit])
        for changed, sign in ((before, -1), (mode, 1)):
            if changed == COLUMNS:
                continue
            ranks, blocks = self.ranks_of_mode(changed), self.blocks(changed)
            self._sums[ranks] += sign * blocks.asks[unit]
            self.free_bytes[ranks] -= sign * blocks.size_bytes[unit]
            self.shared_ms += sign * float(blocks.shared_ms[unit])
            if changed == ROWS:
                self._num_rows += sign
                if self._num_rows == (1 if sign > 0 else 0):
                    self.shared_ms += sign * blocks.fixed_ms
            else:
                self._num_host_rows[changed] += sign
                self._count_exchanged(sign)
            self._touched.update(range(*ranks.indices(self.problem.world_size)))
        self.mode[unit] = mode

    def _count_exchanged(self, more: int) -> None:
        """Plans of nothing but row blocks on all ranks have no all-to-alls."""
        self._num_exchanged += more
        if self._num_exchanged == (1 if more > 0 else 0):
            self.shared_ms += more * self.problem.prices.fixed_ms

    def _new_slot(self) -> int:
        if not self._free_slots:
            size = len(self.piece_unit)
            grow = np.zeros(size, dtype=np.int64)
            self.piece_unit = np.concatenate([self.piece_unit, grow])
            self.piece_shape = np.concatenate([self.piece_shape, grow])
            self.piece_rank = np.concatenate([self.piece_rank, grow - 1])
            self._free_slots = list(range(size, 2 * size))[::-1]
        return self._free_slots.pop()


def by_host(values: NDArray[Number], num_hosts: int) -> NDArray[Number]:
    """[H, W / H, ...], of values [W, ...]."""
    return values.reshape(num_hosts, -1, *values.shape[1:])
