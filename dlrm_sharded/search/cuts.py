"""Construct: cut each unit into pieces, before anything is placed.

This is NeuroShard's outer decision (arXiv:2305.01868, sec. 3.3), taken for all tables at once: no
piece should take longer than a target.

Letters: U units, L loads; see `problem.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State


@dataclass(frozen=True, slots=True)
class UnitCut:
    """The cut of a unit into column pieces, or into one kind of row blocks.

    The ranks or the group of the pieces are chosen when they are placed.

    Args:
        widths: steps of each column piece; empty for row blocks.
        kind: index into `Problem.blocks`; None for column pieces.
    """

    widths: tuple[int, ...] = ()
    kind: int | None = None

    def is_in_rows(self, problem: Problem) -> bool:
        """Return whether the cut has row blocks that are not replicas."""
        return self.kind is not None and not problem.blocks[self.kind].is_replica


@dataclass(frozen=True, slots=True)
class CutOption:
    """A cut whose pieces are possible and fit the memory of the largest rank.

    Args:
        processing_ms: processing time of the costliest piece.
        total_ms: loads of all ranks together.
    """

    cut: UnitCut
    processing_ms: float
    total_ms: float


def cut_units(
    problem: Problem, target_ms: float, *, kinds: Sequence[int | None] | None = None
) -> tuple[UnitCut, ...]:
    """Leave each unit whole if that fits a rank and the target, else take its cheapest cut.

    Args:
        kinds: the kinds of `UnitCut` to take; others only for units that have none of these. None
            for all kinds.
    """
    # Whole units need no options; these take long to list for many tables.
    whole = problem.whole_shape
    fits = problem.processing_ms(problem.load[whole]) <= target_ms
    fits &= problem.possible[whole] & (problem.size_bytes[whole] <= problem.capacity_bytes.max())
    fits &= ~problem.must_replicate
    if kinds is not None and None not in kinds:
        fits[:] = False
    return tuple(
        UnitCut((int(steps),)) if fit else _best_cut(problem, unit, target_ms, kinds)
        for unit, (fit, steps) in enumerate(zip(fits, problem.num_steps, strict=True))
    )


def cuts_of(state: State) -> tuple[UnitCut, ...]:
    """Return the cuts of a state, without the places of the pieces."""
    problem = state.problem
    return tuple(
        UnitCut(tuple(sorted(widths.values(), reverse=True)))
        if group == COLUMNS
        else UnitCut(kind=problem.groups[group].kind)
        for widths, group in zip(state.widths, state.group.tolist(), strict=True)
    )


def _best_cut(
    problem: Problem, unit: int, target_ms: float, kinds: Sequence[int | None] | None
) -> UnitCut:
    """Return the cut within the target with the least total load, else the one nearest to it."""
    options = cut_options(problem, unit)
    if kinds is not None:
        # a unit of one step has no other columns
        options = [option for option in options if option.cut.kind in kinds] or options
    if not options:
        # Pieces of one step may still fit ranks that the others leave free.
        return UnitCut((1,) * int(problem.num_steps[unit]))
    return min(options, key=lambda o: (max(0.0, o.processing_ms - target_ms), o.total_ms)).cut


def cut_options(problem: Problem, unit: int) -> list[CutOption]:
    """Return the unit whole, in balanced column pieces, in row blocks, and replicated."""
    in_groups = list(_group_options(problem, unit))
    if problem.must_replicate[unit]:
        return in_groups  # the only kind that is possible for it
    return [*_column_options(problem, unit), *in_groups]


def _column_options(problem: Problem, unit: int) -> Iterator[CutOption]:
    world_size, steps = problem.world_size, int(problem.num_steps[unit])
    capacity = int(problem.capacity_bytes.max())
    num_ranks = world_size if problem.allowed is None else int(problem.allowed[unit].sum())
    for num_pieces in range(1, min(steps, num_ranks) + 1):
        # One more piece pays only if the widest piece becomes narrower.
        if num_pieces > 1 and -(-steps // num_pieces) == -(-steps // (num_pieces - 1)):
            continue
        # 7 steps in 3 pieces: widths 3, 2, 2.
        narrow, num_wide = divmod(steps, num_pieces)
        widths = (narrow + 1,) * num_wide + (narrow,) * (num_pieces - num_wide)
        shapes = problem.first_shape[unit] + np.array(widths) - 1
        if problem.size_bytes[shapes].max() > capacity or not problem.possible[shapes].all():
            continue
        # Every rank pays the shared time, and `total_ms` is that of all ranks.
        shared_ms = float(problem.shared_ms[shapes].sum()) * world_size
        yield CutOption(
            UnitCut(widths),
            float(problem.processing_ms(problem.load[shapes]).max()),
            float(problem.load[shapes].sum()) + shared_ms,
        )


def _group_options(problem: Problem, unit: int) -> Iterator[CutOption]:
    capacity = int(problem.capacity_bytes.max())
    for kind, blocks in enumerate(problem.blocks):
        # The first block is the largest.
        if not blocks.possible[unit] or blocks.size_bytes[unit, 0] > capacity:
            continue
        load = blocks.load[unit]
        total_ms = (float(load.sum()) + blocks.fixed_ms) * blocks.group_size
        total_ms += float(blocks.shared_ms[unit]) * problem.world_size
        yield CutOption(UnitCut(kind=kind), float(problem.processing_ms(load)), total_ms)
