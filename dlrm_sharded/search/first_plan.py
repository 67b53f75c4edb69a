"""A first plan: cut units placed one after another.

With the cut this is NeuroShard's inner decision (arXiv:2305.01868, sec. 3.3), its greedy placement.
Where that runs out of memory, the largest pieces come first, columns are cut wherever a rank is
full, and as a last resort units become row blocks, which load all ranks of a group alike.

Letters: U units, L loads, W ranks; see `problem.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.search.cuts import UnitCut, cut_options
from dlrm_sharded.search.greedy_placer import GreedyPlacer
from dlrm_sharded.search.problem import Blocks, Problem
from dlrm_sharded.search.state import State

LARGEST_FIRST = (0.0, 0.1, 0.4, 1.0)
"""Shares of the pieces, the largest in memory, that are placed before the others; each is tried."""

PACKINGS = ("roomiest", "tightest", "even", "coarsest")
"""Ways to pack units by memory alone: whole ones on the rank with most room for them or with least,
parts of the others on the freest ranks, as much as each holds, or spread evenly. The last one
spreads all units evenly, those with the largest steps of columns first: small ones fill gaps."""

EVEN = ("even", "coarsest")

MAX_PACKINGS = 12
"""Largest number of attempts to pack units by memory alone."""

Piece = tuple[int, int]
"""A unit and a width."""

Scores = Callable[[GreedyPlacer, Sequence[Piece]], Iterator[tuple[int, Floats]]]
"""Yields the next piece to place, and [W] scores of ranks, of which the lowest gets the piece."""


def first_plan(problem: Problem, cuts: Sequence[UnitCut]) -> State | None:
    """Return a state in which every unit is placed; None if none was found that fits."""
    for largest_first in LARGEST_FIRST:
        state = _place_costliest_first(problem, cuts, largest_first)
        if state is not None:
            return state
    cuts = _without_replicas(problem, cuts)
    if (state := _pack(problem, cuts)) is not None:
        return state
    # Blocks on more ranks are dearer and leave more room on each of them.
    smaller = [
        cut if not cut.is_in_rows(problem) else _row_cut(problem, unit, smallest=True) or cut
        for unit, cut in enumerate(cuts)
    ]
    return _pack(problem, smaller, smallest=True)


def _without_replicas(problem: Problem, cuts: Sequence[UnitCut]) -> list[UnitCut]:
    """Return the cuts with units whole that need not be replicas, which take most memory."""
    return [
        UnitCut((int(problem.num_steps[unit]),))
        if cut.kind is not None and not cut.is_in_rows(problem) and not problem.must_replicate[unit]
        else cut
        for unit, cut in enumerate(cuts)
    ]


def _place_costliest_first(
    problem: Problem, cuts: Sequence[UnitCut], largest_first: float
) -> State | None:
    """Place the costliest piece first, each on the rank with room where it adds least.

    Args:
        largest_first: share of the pieces, the largest in memory, that come before the others.
    """

    def scores(placer: GreedyPlacer, pieces: Sequence[Piece]) -> Iterator[tuple[int, Floats]]:
        shapes = [problem.shape(*piece) for piece in pieces]
        load = problem.load[shapes].sum(axis=1)
        size = problem.size_bytes[shapes]
        # An infinite load puts the largest pieces first, in order of their size.
        load[np.argsort(-size, kind="stable")[: int(largest_first * len(pieces))]] = np.inf
        for i in np.lexsort((-size, -load)).tolist():  # by load, then by size
            yield i, placer.norm_increase(shapes[i])

    return _place_pieces(problem, cuts, scores)


def width_sorted_plan(problem: Problem, cuts: Sequence[UnitCut]) -> State | None:
    """Return a state whose ranks have shards of similar widths; None if something fits no rank.

    Ranks are filled one after another. That suits devices on which the widest shard of a rank slows
    down all others.
    """

    def scores(placer: GreedyPlacer, pieces: Sequence[Piece]) -> Iterator[tuple[int, Floats]]:
        shapes = np.array([problem.shape(*piece) for piece in pieces], dtype=np.int64)
        load = problem.load[shapes].sum(axis=1)
        num_cols = np.array([problem.num_columns(*piece) for piece in pieces])
        full = (float(placer.load.sum()) + float(load.sum())) / problem.world_size
        rank = 0
        for i in np.lexsort((-load, -num_cols)).tolist():
            while rank < problem.world_size - 1 and placer.load[rank].sum() + load[i] / 2 > full:
                rank += 1
            yield i, np.abs(np.arange(problem.world_size) - rank).astype(np.float64)

    return _place_pieces(problem, cuts, scores)


def _place_pieces(problem: Problem, cuts: Sequence[UnitCut], scores: Scores) -> State | None:
    """Place row blocks, then column pieces; return None if something fits no rank."""
    state = State(problem)
    placer = _new_placer(state)
    # Row blocks need memory on all ranks of a group, so they come before anything else.
    if not _place_row_blocks(problem, placer, cuts):
        return None
    pieces = [(unit, width) for unit, cut in enumerate(cuts) for width in cut.widths]
    for i, score in scores(placer, pieces):
        unit, width = pieces[i]
        rank = placer.best_rank(unit, width, score)
        if rank is not None:
            placer.place(unit, rank, width)
        elif not _place_in_parts(state, placer, unit, width):
            return None
    return _finished(state)


def _pack(problem: Problem, cuts: Sequence[UnitCut], *, smallest: bool = False) -> State | None:
    """Place units by memory alone; cut into row blocks those that find no room, and start again.

    With every attempt, more of the largest units become row blocks too. Of the ways that find room
    for all, the cheapest one is returned.

    Args:
        smallest: whether the largest units alone become row blocks, on as many ranks as possible.
    """
    size = problem.size_bytes[problem.whole_shape]
    largest = np.argsort(-size, kind="stable").tolist()
    cuts = list(cuts)
    for attempt in range(MAX_PACKINGS):
        before, found = list(cuts), list[State]()
        for way in PACKINGS:
            state = State(problem)
            left = _place_largest_first(state, cuts, way)
            if left == []:
                found.append(_finished(state))
        if found:
            return min(found, key=lambda state: state.objective_ms)
        if left is None:
            return None
        num_largest = 2**attempt // 4  # 0, 0, 1, 2, 4, ...
        for unit in largest[:num_largest] if smallest else left + largest[:num_largest]:
            cuts[unit] = _row_cut(problem, unit, smallest=smallest) or cuts[unit]
        if cuts == before and num_largest >= len(largest):
            return None
    return None


def _row_cut(problem: Problem, unit: int, *, smallest: bool) -> UnitCut | None:
    """Return the unit's cheapest cut into row blocks, or that into the smallest; None if none."""
    options = [option for option in cut_options(problem, unit) if option.cut.is_in_rows(problem)]
    if not options:
        return None
    if smallest:
        return max(options, key=lambda option: option.cut.group_size(problem)).cut
    return min(options, key=lambda option: option.total_ms).cut


def _place_largest_first(state: State, cuts: Sequence[UnitCut], way: str) -> list[int] | None:
    """Place units that cannot be cut first, then the largest, whole or cut where a rank is full.

    Args:
        way: one of `PACKINGS`.

    Returns:
        The units that found no room; None if row blocks found none.
    """
    problem, placer = state.problem, _new_placer(state)
    if not _place_row_blocks(problem, placer, cuts):
        return None
    units = [unit for unit, cut in enumerate(cuts) if cut.kind is None]
    size = problem.size_bytes[problem.whole_shape]
    if way == "coarsest":
        size = problem.size_bytes[problem.first_shape[:-1]]
    # Units that cannot be cut need a whole gap, so they come while there are some.
    units.sort(key=lambda unit: (int(problem.num_steps[unit]) > 1, -int(size[unit])))
    left = []
    for unit in units:
        width = int(problem.num_steps[unit])
        free = placer.free_bytes.astype(np.float64)
        rank = None
        if width == 1 or way != "coarsest":
            rank = placer.best_rank(unit, width, free if way == "tightest" else -free)
        if rank is not None:
            placer.place(unit, rank, width)
        elif not _place_in_parts(state, placer, unit, width, evenly=way in EVEN):
            left.append(unit)
    return left


def _place_in_parts(
    state: State, placer: GreedyPlacer, unit: int, width: int, *, evenly: bool = False
) -> bool:
    """Fill the freest ranks with as many columns as each has room for; or change nothing.

    Args:
        evenly: give the rank that is freest at the time one more step of columns, instead.
    """
    problem = state.problem
    first = int(problem.first_shape[unit])
    # Of widths 1, 2, ..., ascending.
    sizes = problem.size_bytes[first : first + problem.max_width(unit)]
    widths, allowed = state.widths[unit], state.allowed_ranks(unit)
    if evenly:
        allowed = allowed.copy()
        allowed[list(widths)] = False
        even = _even_parts(np.where(allowed, placer.free_bytes, -1), sizes, width)
        for rank in np.flatnonzero(even).tolist():
            placer.place(unit, rank, int(even[rank]))
        return bool(even.any())
    parts = []
    for rank in np.argsort(-placer.free_bytes, kind="stable").tolist():
        if rank in widths or not allowed[rank]:
            continue
        room = int(np.searchsorted(sizes, placer.free_bytes[rank], side="right"))
        if room == 0 or width == 0:
            break
        parts.append((rank, min(room, width)))
        width -= parts[-1][1]
    if width:
        return False
    for rank, part in parts:
        placer.place(unit, rank, part)
    return True


def _even_parts(
    free_bytes: NDArray[np.int64], sizes: NDArray[np.int64], width: int
) -> NDArray[np.int64]:
    """Return [W], steps of columns of each rank, `width` in all; zeros if there is no room.

    Args:
        free_bytes: [W], negative where no columns may lie.
        sizes: bytes of 1, 2, ... steps on a rank, ascending.
    """
    parts = np.zeros(len(free_bytes), dtype=np.int64)
    sizes = np.concatenate([[0], sizes])
    for _ in range(width):
        after = free_bytes - sizes[np.minimum(parts + 1, len(sizes) - 1)]
        after = np.where(parts < len(sizes) - 1, after, -1)
        rank = int(after.argmax())
        if after[rank] < 0:
            return np.zeros_like(parts)
        parts[rank] += 1
    return parts


def _place_row_blocks(problem: Problem, placer: GreedyPlacer, cuts: Sequence[UnitCut]) -> bool:
    """Place all row blocks, on larger groups than those of the cut if none of these has room.

    Those of the largest groups come first, as they need room on all of their ranks.
    """
    in_blocks = [
        (unit, problem.blocks[cut.kind]) for unit, cut in enumerate(cuts) if cut.kind is not None
    ]
    for unit, first_choice in sorted(in_blocks, key=lambda choice: -choice[1].group_size):
        kinds = [first_choice, *_larger_kinds(problem, first_choice, unit)]
        if not any(placer.place_blocks(unit, blocks) for blocks in kinds):
            return False
    return True


def _larger_kinds(problem: Problem, blocks: Blocks, unit: int) -> list[Blocks]:
    """Return kinds of row blocks that the unit can have on larger groups, smaller blocks each."""
    return [
        larger
        for larger in problem.blocks
        if larger.group_size > blocks.group_size
        and larger.possible[unit]
        and not (larger.is_replica or blocks.is_replica)
    ]


def _new_placer(state: State) -> GreedyPlacer:
    """Return a placer that measures loads in those of a rank that has its share of the task."""
    problem = state.problem
    mean = problem.load[problem.whole_shape].sum(axis=0) / problem.world_size
    return GreedyPlacer(state, scale=mean + 1e-12)  # a load may be zero on all ranks


def _finished(state: State) -> State:
    state.refresh()
    state.log.clear()
    return state
