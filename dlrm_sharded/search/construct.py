"""A first plan: tables cut so that no piece exceeds a target, then placed one after another.

With the target it is NeuroShard's outer decision (arXiv:2305.01868, sec. 3.3), what to split, taken
for all tables at once; the inner one is its greedy placement. Where that runs out of memory, the
largest come first, columns are cut wherever a rank is full, and as a last resort tables become row
blocks, which load all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.search.problem import Mask, Problem
from dlrm_sharded.search.state import COLUMNS, ROWS, State, by_host
from dlrm_sharded.tables import COLUMN_MULTIPLE
from dlrm_sharded.task import GIB

LARGEST_FIRST = (0.0, 0.1, 0.4, 1.0)
"""Shares of the pieces, the largest ones, that are placed before the others."""

MAX_PACKINGS = 12

ANY_HOST = 0
"""Mode of a cut into row blocks on the ranks of one host, whichever suits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a unit is cut: a mode, or the widths of its column pieces in steps."""

    mode: int
    widths: tuple[int, ...] = ()


def construct(problem: Problem, cuts: Sequence[Cut]) -> State | None:
    """A state in which everything is placed, or None where nothing was found that fits."""
    for share in LARGEST_FIRST:
        state = _Greedy(problem).place(cuts, share)
        if state is not None:
            return state
    return _packed(problem, cuts)


def why_infeasible(problem: Problem) -> str | None:
    """A proof that no plan fits the ranks' memory, in words; None where none was found."""
    size, tables = problem.size_bytes[problem.whole], problem.task.tables
    capacity = problem.capacity
    if size.sum() > capacity.sum():
        return (
            f"no plan can fit: the tables need {size.sum():,} B ({size.sum() / GIB:.2f} GiB), all "
            f"{problem.world_size} ranks together have {capacity.sum():,} B "
            f"({capacity.sum() / GIB:.2f} GiB); add ranks or raise topology.memory_gib"
        )
    for unit in range(problem.num_units):
        least = _least_bytes(problem, unit)
        if problem.allowed is None and least <= capacity.min():
            continue
        may = np.ones_like(capacity) > 0 if problem.allowed is None else problem.allowed[unit]
        room = capacity[may]
        if (least <= room.max() and size[unit] <= room.sum()) or _rows_may_fit(problem, unit):
            continue
        names = ", ".join(repr(tables[index].name) for index in problem.tables[unit])
        return (
            f"no plan can fit: {names} needs {size[unit]:,} B, in pieces of {least:,} B or more, "
            f"and its {len(room)} ranks have {room.max():,} B or less each; add ranks, raise "
            "topology.memory_gib, cap the table's rows, or drop constraints"
        )
    return None


def _least_bytes(problem: Problem, unit: int) -> int:
    """Of a unit's smallest column shard, the search's steps aside."""
    if not problem.step[unit]:
        return int(problem.size_bytes[problem.whole[unit]])
    table = problem.task.tables[problem.tables[unit][0]]
    return problem.task.topology.shard_bytes(table.num_embeddings, COLUMN_MULTIPLE)


def _rows_may_fit(problem: Problem, unit: int) -> bool:
    """Whether a unit's row blocks fit some ranks; the last block may be smaller than the others."""
    for blocks, num_groups in (
        (problem.rows, 1),
        (problem.host_rows, problem.world_size // problem.hosts.ranks_per_host),
    ):
        if problem.world_size > 1 and blocks is not None and blocks.possible[unit]:
            room = by_host(problem.capacity, num_groups)[:, :-1]
            if blocks.size_bytes[unit, 0] <= room.min(axis=1).max():
                return True
    return False


def cut_all(
    problem: Problem, target_ms: float, *, columns: bool = True, rows: bool = True
) -> list[Cut]:
    """Each unit whole where that fits a rank and the target, else in its cheapest fitting parts.

    Args:
        columns, rows: kinds of parts to take; others where a unit has none of these.
    """
    whole = problem.whole
    fits = problem.work_ms(problem.load[whole]) <= target_ms
    fits &= problem.size_bytes[whole] <= problem.capacity.max()
    return [
        Cut(COLUMNS, (int(steps),)) if fit else _cut(problem, unit, target_ms, columns, rows)
        for unit, (fit, steps) in enumerate(zip(fits, problem.num_steps, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Option:
    """A cut that fits a rank's memory: work of its costliest piece, loads of all ranks together."""

    cut: Cut
    work_ms: float
    total_ms: float


def _cut(problem: Problem, unit: int, target_ms: float, columns: bool, rows: bool) -> Cut:
    """The cheapest for all ranks together among cuts within the target, else that nearest to it."""
    found = options(problem, unit)
    wanted = [o for o in found if (columns if o.cut.mode == COLUMNS else rows)]
    found = wanted or found
    if not found:
        return Cut(COLUMNS, (1,) * int(problem.num_steps[unit]))
    return min(found, key=lambda o: (max(0.0, o.work_ms - target_ms), o.total_ms)).cut


def options(problem: Problem, unit: int) -> list[Option]:
    """Whole, in any number of nearly even column pieces, in row blocks on all ranks or a host's."""
    world_size, capacity = problem.world_size, int(problem.capacity.max())
    first, steps = int(problem.first[unit]), int(problem.num_steps[unit])
    found = []
    most = world_size if problem.allowed is None else int(problem.allowed[unit].sum())
    for parts in range(1, min(steps, most) + 1):
        if parts > 1 and -(-steps // parts) == -(-steps // (parts - 1)):
            continue
        base, more = divmod(steps, parts)
        widths = (base + 1,) * more + (base,) * (parts - more)
        shapes = first + np.array(widths) - 1
        if problem.size_bytes[shapes].max() > capacity:
            continue
        shared_ms = float(problem.shared_ms[shapes].sum()) * world_size
        found.append(
            Option(
                Cut(COLUMNS, widths),
                float(problem.work_ms(problem.load[shapes]).max()),
                float(problem.load[shapes].sum()) + shared_ms,
            )
        )
    for mode, blocks, size in (
        (ROWS, problem.rows, world_size),
        (ANY_HOST, problem.host_rows, problem.hosts.ranks_per_host),
    ):
        if blocks is None or not blocks.possible[unit] or blocks.size_bytes[unit, 0] > capacity:
            continue
        load = blocks.load[unit]
        total_ms = (float(load.sum()) + blocks.fixed_ms) * size
        total_ms += float(blocks.shared_ms[unit]) * world_size
        found.append(Option(Cut(mode), float(problem.work_ms(load)), total_ms))
    return found


def _packed(problem: Problem, cuts: Sequence[Cut]) -> State | None:
    """By memory alone; units for which no room is left are cut into row blocks, and all is packed
    again, then ever more of the largest ones too.
    """
    size = problem.size_bytes[problem.whole]
    largest = np.argsort(-size, kind="stable").tolist()
    cuts = list(cuts)
    for attempt in range(MAX_PACKINGS):
        before = list(cuts)
        for tightest in (False, True):
            greedy = _Greedy(problem)
            left = greedy.pack(cuts, tightest=tightest)
            if left == []:
                return greedy.done()
        if left is None:
            return None
        for unit in left + largest[: 2**attempt // 4]:
            by_rows = [o for o in options(problem, unit) if o.cut.mode != COLUMNS]
            if by_rows:
                cuts[unit] = min(by_rows, key=lambda option: option.total_ms).cut
        if cuts == before and 2**attempt // 4 >= len(largest):
            return None
    return None


class _Greedy:
    """Places cuts one after another, with the load and the memory of every rank."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._state = State(problem)
        self._load = np.zeros((problem.world_size, problem.load.shape[1]))
        self._mean = problem.load[problem.whole].sum(axis=0) / problem.world_size + 1e-12
        self._free = problem.capacity.copy()

    def place(self, cuts: Sequence[Cut], largest_first: float) -> State | None:
        """The costliest piece first, on the rank that has room and suffers least from it.

        Args:
            largest_first: share of the pieces that come before, by memory.
        """
        if not self._set_blocks(cuts):
            return None
        pieces = [(unit, width) for unit, cut in enumerate(cuts) for width in cut.widths]
        shape = [self._shape(*piece) for piece in pieces]
        load = self._problem.load[shape].sum(axis=1)
        size = self._problem.size_bytes[shape]
        first = np.argsort(-size, kind="stable")[: int(largest_first * len(pieces))]
        load[first] = np.inf
        for i in np.lexsort((-size, -load)).tolist():
            unit, width = pieces[i]
            rank = self._best(unit, width, self._added(unit, width))
            if rank is not None:
                self._put(unit, rank, width)
            elif not self._spread(unit, width):
                return None
        return self.done()

    def pack(self, cuts: Sequence[Cut], *, tightest: bool) -> list[int] | None:
        """Units that cannot be cut first, then the largest, whole or cut where a rank is full.

        Args:
            tightest: on the rank that has least room for it, not on the one with most.

        Returns:
            The units for which no room was left; None where row blocks had none.
        """
        if not self._set_blocks(cuts):
            return None
        units = [u for u, cut in enumerate(cuts) if cut.mode == COLUMNS]
        size = self._problem.size_bytes[self._problem.whole]
        units.sort(key=lambda u: (int(self._problem.num_steps[u]) > 1, -int(size[u])))
        left = []
        for unit in units:
            width = int(self._problem.num_steps[unit])
            free = self._free.astype(np.float64)
            rank = self._best(unit, width, free if tightest else -free)
            if rank is not None:
                self._put(unit, rank, width)
            elif not self._spread(unit, width):
                left.append(unit)
        return left

    def _spread(self, unit: int, width: int) -> bool:
        """Fill the freest ranks with as many columns as each has room for; or change nothing."""
        problem = self._problem
        first = int(problem.first[unit])
        sizes = problem.size_bytes[first : first + int(problem.num_steps[unit])]
        held, may = self._state.widths[unit], self._may(unit)
        parts = []
        for rank in np.argsort(-self._free, kind="stable").tolist():
            if rank in held or not may[rank]:
                continue
            room = int(np.searchsorted(sizes, self._free[rank], side="right"))
            if room == 0 or width == 0:
                break
            parts.append((rank, min(room, width)))
            width -= parts[-1][1]
        if width:
            return False
        for rank, part in parts:
            self._put(unit, rank, part)
        return True

    def _best(self, unit: int, width: int, score: Floats) -> int | None:
        """The rank of the lowest score that may hold the piece and has room for it."""
        size = self._problem.size_bytes[self._shape(unit, width)]
        fits = self._free >= size
        if self._problem.allowed is not None or self._problem.apart.size:
            fits &= self._may(unit)
        held = self._state.widths[unit]
        if held:
            fits[list(held)] = False
        if not fits.any():
            return None
        return int(np.where(fits, score, np.inf).argmin())

    def _may(self, unit: int) -> Mask:
        """[W], where the constraints let the unit be."""
        return may_hold(self._state, unit)

    def _put(self, unit: int, rank: int, width: int) -> None:
        shape = self._shape(unit, width)
        self._state.set_width(unit, rank, width)
        self._load[rank] += self._problem.load[shape]
        self._free[rank] -= self._problem.size_bytes[shape]

    def _added(self, unit: int, width: int) -> Floats:
        """[W], by how much a piece raises the 8-norm of the ranks' loads, on each of them."""
        before = self._load / self._mean
        after = before + self._problem.load[self._shape(unit, width)] / self._mean
        for _ in range(3):
            before, after = before * before, after * after
        added: Floats = (after - before) @ self._mean
        return added

    def _set_blocks(self, cuts: Sequence[Cut]) -> bool:
        """Row blocks come first, a host's on that of least load, or on all ranks without room."""
        state = self._state
        for unit, cut in enumerate(cuts):
            if cut.mode == COLUMNS:
                continue
            mode = cut.mode
            if mode != ROWS:
                blocks = state.blocks(mode)
                of_hosts = self._load.reshape(state.num_hosts, -1).sum(axis=1)
                room = by_host(self._free, state.num_hosts) >= blocks.size_bytes[unit]
                may = (by_host(may_hold(state, unit), state.num_hosts) & room).all(axis=1)
                mode = int(np.where(may, of_hosts, np.inf).argmin()) if may.any() else ROWS
                if mode == ROWS and not self._problem.rows.possible[unit]:
                    return False
            ranks, blocks = state.ranks_of_mode(mode), state.blocks(mode)
            state.set_mode(unit, mode)
            self._load[ranks] += blocks.load[unit]
            self._free[ranks] -= blocks.size_bytes[unit]
            if self._free[ranks].min() < 0:
                return False
        return True

    def _shape(self, unit: int, width: int) -> int:
        return int(self._problem.first[unit]) + width - 1

    def done(self) -> State:
        """The state with everything placed."""
        self._state.refresh()
        self._state.log.clear()
        return self._state


def may_hold(state: State, unit: int) -> Mask:
    """[W], where the constraints let a piece of the unit be, as the others lie."""
    problem = state.problem
    may = np.ones(problem.world_size, dtype=bool)
    if problem.allowed is not None:
        may &= problem.allowed[unit]
    groups = problem.apart[unit]
    if groups.any():
        others = state.apart_count[groups].copy()
        others[:, list(state.widths[unit])] -= 1
        may &= ~(others > 0).any(axis=0)
    return may
