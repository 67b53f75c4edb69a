"""Construct: place the pieces of cut units one after another.

With the cuts this is NeuroShard's inner decision (arXiv:2305.01868, sec. 3.3), a greedy placement.
Where that runs out of memory, units are packed by memory alone: columns are cut wherever a rank is
full, and as a last resort units become row blocks, which load all ranks of a group alike.

Letters: U units, L loads, W ranks; see `problem.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_sharded.search.cuts import UnitCut, cut_options
from dlrm_sharded.search.greedy_placer import GreedyPlacer
from dlrm_sharded.search.problem import Blocks, Problem
from dlrm_sharded.search.state import State

MAX_PACKINGS = 12
"""Largest number of attempts to pack units by memory alone."""


def first_plan(problem: Problem, cuts: Sequence[UnitCut]) -> State | None:
    """Return a state in which every unit is placed; None if none was found that fits."""
    return placed_plan(problem, cuts) or _packed_plan(problem, cuts)


def placed_plan(
    problem: Problem, cuts: Sequence[UnitCut], *, by_width: bool = False
) -> State | None:
    """Return a state with all units in these cuts; None if a piece fits no rank.

    The costliest pieces come first, and each goes where it adds least to a norm of the loads.

    Args:
        by_width: whether the widest pieces come first, and fill one rank after another. That suits
            devices on which the widest shard of a rank slows down all others.
    """
    state = State(problem)
    placer = _new_placer(state)
    if not _place_row_blocks(problem, placer, cuts):
        return None
    pieces = [(unit, width) for unit, cut in enumerate(cuts) for width in cut.widths]
    shapes = np.array([problem.shape(*piece) for piece in pieces], dtype=np.int64)
    load = problem.load[shapes].sum(axis=1)
    num_cols = np.array([by_width * problem.num_columns(*piece) for piece in pieces])
    full = (float(placer.load.sum()) + float(load.sum())) / problem.world_size
    ranks, current = np.arange(problem.world_size), 0
    for i in np.lexsort((-problem.size_bytes[shapes], -load, -num_cols)).tolist():
        unit, width = pieces[i]
        if by_width:
            while current < ranks[-1] and placer.load[current].sum() + load[i] / 2 > full:
                current += 1
            score = np.abs(ranks - current).astype(np.float64)
        else:
            score = placer.norm_increase(int(shapes[i]))
        rank = placer.best_rank(unit, width, score)
        if rank is not None:
            placer.place(unit, rank, width)
        elif not _place_in_parts(state, placer, unit, width):
            return None
    state.settle()
    return state


def _packed_plan(problem: Problem, cuts: Sequence[UnitCut]) -> State | None:
    """Return a state in which units are placed by memory alone; None if none was found that fits.

    Units that fit nowhere become row blocks, and all are placed again.
    """
    cuts = _without_replicas(problem, cuts)
    for _ in range(MAX_PACKINGS):
        state = State(problem)
        left = _place_largest_first(state, cuts)
        if left == []:
            state.settle()
            return state
        in_rows = {unit: _cheapest_row_cut(problem, unit) for unit in left or ()}
        if not any(in_rows.values()):
            return None
        for unit, cut in in_rows.items():
            cuts[unit] = cut or cuts[unit]
    return None


def _without_replicas(problem: Problem, cuts: Sequence[UnitCut]) -> list[UnitCut]:
    """Return the cuts, with whole units in place of optional replicas, which take most memory."""
    return [
        UnitCut((int(problem.num_steps[unit]),))
        if cut.kind is not None and not cut.is_in_rows(problem) and not problem.must_replicate[unit]
        else cut
        for unit, cut in enumerate(cuts)
    ]


def _cheapest_row_cut(problem: Problem, unit: int) -> UnitCut | None:
    """Return the unit's cheapest cut into row blocks; None if it has none."""
    options = [option for option in cut_options(problem, unit) if option.cut.is_in_rows(problem)]
    cheapest = min(options, key=lambda option: option.total_ms, default=None)
    return None if cheapest is None else cheapest.cut


def _place_largest_first(state: State, cuts: Sequence[UnitCut]) -> list[int] | None:
    """Place units that cannot be cut first, then the largest, whole or cut where a rank is full.

    Returns:
        The units that fit nowhere; None if row blocks do not fit.
    """
    problem, placer = state.problem, _new_placer(state)
    if not _place_row_blocks(problem, placer, cuts):
        return None
    units = [unit for unit, cut in enumerate(cuts) if cut.kind is None]
    size = problem.size_bytes[problem.whole_shape]
    # Units that cannot be cut need a large enough gap, so they come while there are some.
    units.sort(key=lambda unit: (int(problem.num_steps[unit]) > 1, -int(size[unit])))
    left = []
    for unit in units:
        width = int(problem.num_steps[unit])
        rank = placer.best_rank(unit, width, -placer.free_bytes.astype(np.float64))
        if rank is not None:
            placer.place(unit, rank, width)
        elif not _place_in_parts(state, placer, unit, width):
            left.append(unit)
    return left


def _place_in_parts(state: State, placer: GreedyPlacer, unit: int, width: int) -> bool:
    """Fill the freest ranks with as many columns as fit each; change nothing if some are left."""
    problem = state.problem
    first = int(problem.first_shape[unit])
    # Of widths 1, 2, ..., ascending.
    sizes = problem.size_bytes[first : first + problem.max_width(unit)]
    allowed = state.allowed_ranks(unit)
    allowed[list(state.widths[unit])] = False
    parts = []
    for rank in np.argsort(-placer.free_bytes, kind="stable").tolist():
        most = int(np.searchsorted(sizes, placer.free_bytes[rank], side="right"))
        if allowed[rank] and most and width:
            parts.append((rank, min(most, width)))
            width -= parts[-1][1]
    if width:
        return False
    for rank, part in parts:
        placer.place(unit, rank, part)
    return True


def _place_row_blocks(problem: Problem, placer: GreedyPlacer, cuts: Sequence[UnitCut]) -> bool:
    """Place all row blocks, on larger groups than the cut says if they fit none of those.

    They need memory on all ranks of a group, so they come before anything else, the largest groups
    first.
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
    """Return kinds of row blocks that the unit can have on larger groups, with smaller blocks."""
    return [
        larger
        for larger in problem.blocks
        if larger.group_size > blocks.group_size
        and larger.possible[unit]
        and not (larger.is_replica or blocks.is_replica)
    ]


def _new_placer(state: State) -> GreedyPlacer:
    """Return a placer that scales loads by the loads of a rank with an equal share of the task."""
    problem = state.problem
    mean = problem.load[problem.whole_shape].sum(axis=0) / problem.world_size
    return GreedyPlacer(state, scale=mean + 1e-12)  # a load may be zero on all ranks
