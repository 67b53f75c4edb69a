"""A first plan: tables cut so that no piece exceeds a target, then placed one after another.

With the target it is NeuroShard's outer decision (arXiv:2305.01868, sec. 3.3), what to split, taken
for all tables at once; the inner one is its greedy placement. Where that runs out of memory, the
largest come first, columns are cut wherever a rank is full, and as a last resort tables become row
blocks, which load all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.search.problem import Mask, Problem
from dlrm_sharded.search.state import COLUMNS, ROWS, State, by_host
from dlrm_sharded.task import GIB

ANY_HOST = 0
"""Mode of a cut into row blocks on the ranks of one host, whichever suits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a unit is cut: a mode, or the widths of its column pieces in steps."""

    mode: int
    widths: tuple[int, ...] = ()


def construct(problem: Problem, cuts: Sequence[Cut]) -> State | None:
    """A state in which everything is placed, or None where nothing was found that fits."""
    for attempt in (_Greedy(problem).place(cuts), _Greedy(problem).pack(cuts)):
        if attempt is not None:
            return attempt
    return _with_row_blocks(problem, cuts)


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
    least = problem.size_bytes[problem.first[:-1]]
    for unit in np.flatnonzero((least > capacity.min()) | (problem.allowed is not None)).tolist():
        may = problem.allowed[unit] if problem.allowed is not None else np.ones_like(capacity) > 0
        blocks = [problem.rows, *([problem.host_rows] if problem.host_rows is not None else [])]
        if any(b.possible[unit] and b.size_bytes[unit] <= capacity.max() for b in blocks):
            continue
        if least[unit] <= capacity[may].max() and size[unit] <= capacity[may].sum():
            continue
        names = ", ".join(repr(tables[index].name) for index in problem.tables[unit])
        return (
            f"no plan can fit: {names} needs {size[unit]:,} B, in pieces of {least[unit]:,} B or "
            f"more, and its {may.sum()} ranks have {capacity[may].max():,} B or less each; add "
            "ranks, raise topology.memory_gib, cap the table's rows, or drop constraints"
        )
    return None


def cut_all(problem: Problem, target_ms: float) -> list[Cut]:
    """Each unit whole where that fits a rank and the target, else in its cheapest fitting parts."""
    whole = problem.whole
    fits = problem.work_ms(problem.load[whole]) <= target_ms
    fits &= problem.size_bytes[whole] <= problem.capacity.max()
    return [
        Cut(COLUMNS, (int(steps),)) if fit else _cut(problem, unit, target_ms)
        for unit, (fit, steps) in enumerate(zip(fits, problem.num_steps, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Option:
    """A cut that fits a rank's memory: work of its costliest piece, loads of all ranks together."""

    cut: Cut
    work_ms: float
    total_ms: float


def _cut(problem: Problem, unit: int, target_ms: float) -> Cut:
    """The cheapest for all ranks together among cuts within the target, else that nearest to it."""
    found = options(problem, unit)
    if not found:
        return Cut(COLUMNS, (1,) * int(problem.num_steps[unit]))
    return min(found, key=lambda o: (max(0.0, o.work_ms - target_ms), o.total_ms)).cut


def options(problem: Problem, unit: int) -> list[Option]:
    """Whole, in any number of nearly even column pieces, in row blocks on all ranks or a host's."""
    world_size, capacity = problem.world_size, int(problem.capacity.max())
    first, steps = int(problem.first[unit]), int(problem.num_steps[unit])
    found = []
    for parts in range(1, min(steps, world_size) + 1):
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
        if blocks is None or not blocks.possible[unit] or blocks.size_bytes[unit] > capacity:
            continue
        load = blocks.load[unit]
        total_ms = (float(load.sum()) + blocks.fixed_ms) * size
        total_ms += float(blocks.shared_ms[unit]) * world_size
        found.append(Option(Cut(mode), float(problem.work_ms(load)), total_ms))
    return found


def _with_row_blocks(problem: Problem, cuts: Sequence[Cut]) -> State | None:
    """Ever more of the largest units in row blocks, until the rest can be packed."""
    size = problem.size_bytes[problem.whole]
    candidates = [int(u) for u in np.argsort(-size, kind="stable") if problem.rows.possible[u]]
    count = 1
    while candidates and count < 2 * len(candidates):
        by_rows = set(candidates[:count])
        tried = [Cut(ROWS) if u in by_rows else cut for u, cut in enumerate(cuts)]
        state = _Greedy(problem).pack(tried)
        if state is not None:
            return state
        count *= 2
    return None


class _Greedy:
    """Places cuts one after another, with the load and the memory of every rank."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._state = State(problem)
        self._load = np.zeros((problem.world_size, problem.load.shape[1]))
        self._mean = problem.load[problem.whole].sum(axis=0) / problem.world_size + 1e-12
        self._free = problem.capacity.copy()

    def place(self, cuts: Sequence[Cut]) -> State | None:
        """The costliest piece first, on the rank that has room and suffers least from it."""
        if not self._set_blocks(cuts):
            return None
        load = self._problem.load.sum(axis=1)
        pieces = self._pieces(cuts)
        pieces.sort(key=lambda piece: -load[self._shape(*piece)])
        for unit, width in pieces:
            rank = self._best(unit, width, self._added(unit, width))
            if rank is None and not self._spread(unit, width):
                return None
            if rank is not None:
                self._put(unit, rank, width)
        return self._done()

    def pack(self, cuts: Sequence[Cut]) -> State | None:
        """The largest unit first, on the rank with most room, cut wherever that is not enough."""
        if not self._set_blocks(cuts):
            return None
        for tightest in (False, True):
            units = [u for u, cut in enumerate(cuts) if cut.mode == COLUMNS]
            size = self._problem.size_bytes[self._problem.whole]
            units.sort(key=lambda u: (int(self._problem.num_steps[u]) > 1, -int(size[u])))
            if all(self._pack(unit, tightest=tightest) for unit in units):
                return self._done()
            again = _Greedy(self._problem)
            self._state, self._load, self._free = again._state, again._load, again._free
            self._set_blocks(cuts)
        return None

    def _pack(self, unit: int, *, tightest: bool) -> bool:
        width = int(self._problem.num_steps[unit])
        free = self._free.astype(np.float64)
        rank = self._best(unit, width, free if tightest else -free)
        if rank is None:
            return self._spread(unit, width)
        self._put(unit, rank, width)
        return True

    def _spread(self, unit: int, width: int) -> bool:
        """Fill the freest ranks with as many columns as each has room for."""
        problem = self._problem
        first = int(problem.first[unit])
        sizes = problem.size_bytes[first : first + int(problem.num_steps[unit])]
        if len(sizes) == 1:
            return False
        widths = self._state.widths[unit]
        for rank in np.argsort(-self._free, kind="stable").tolist():
            if rank in widths or not self._may(unit)[rank]:
                continue
            room = int(np.searchsorted(sizes, self._free[rank], side="right"))
            if room == 0:
                break
            part = min(room, width)
            self._put(unit, rank, part)
            width -= part
            if width == 0:
                return True
        return False

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
        """Row blocks come first, as they cannot choose; those of one host take the freest one."""
        state = self._state
        for unit, cut in enumerate(cuts):
            if cut.mode == COLUMNS:
                continue
            mode = cut.mode
            if mode != ROWS:
                of_hosts = self._load.reshape(state.num_hosts, -1).sum(axis=1)
                may = by_host(may_hold(state, unit), state.num_hosts).all(axis=1)
                if not may.any():
                    return False
                mode = int(np.where(may, of_hosts, np.inf).argmin())
            ranks, blocks = state.ranks_of_mode(mode), state.blocks(mode)
            state.set_mode(unit, mode)
            self._load[ranks] += blocks.load[unit]
            self._free[ranks] -= blocks.size_bytes[unit]
            if self._free[ranks].min() < 0:
                return False
        return True

    def _pieces(self, cuts: Iterable[Cut]) -> list[tuple[int, int]]:
        return [(unit, width) for unit, cut in enumerate(cuts) for width in cut.widths]

    def _shape(self, unit: int, width: int) -> int:
        return int(self._problem.first[unit]) + width - 1

    def _done(self) -> State:
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
