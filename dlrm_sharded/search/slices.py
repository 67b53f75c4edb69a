"""Construct: several narrow shards of a table on one rank in place of a wide one.

On GPUs the widest shard of a rank slows down all lookups there, see `cost/widest.py`. A wide table
in slices costs more by itself, but may cost less together with busy narrow tables. On CPUs a slice
may fit a cache that the table does not fit, so slices may cost less by themselves.

Letters: N shapes of all units.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from dlrm_sharded.cost.workload import Floats, Indices
from dlrm_sharded.search.cuts import UnitCut, cuts_of
from dlrm_sharded.search.first_plan import first_plan
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State

SLICE_COLUMNS = (32, 64, 128, 256, 512, 1024)
"""Widths of slices that are tried; the smallest ones fill the threads of a part of a warp. Study:
slices."""

MIN_CPU_COLUMNS = 128
"""Least width of slices on CPUs, where narrower ones are slower than predicted."""

MOST_OF_RANK = 0.5
"""Share of the smallest rank's memory that a piece may take if its unit is on all ranks. Study:
slices."""


def in_slices(state: State, columns: int) -> State | None:
    """Return a state with the same columns on every rank, in slices of `columns` or fewer.

    It is None if no piece is wider, or if the slices do not fit.
    """
    problem = state.problem
    placed = state.piece_rank >= 0
    units, shapes = state.piece_unit[placed], state.piece_shape[placed]
    num_columns = (shapes - problem.first_shape[units] + 1) * problem.columns_per_step[units]
    if num_columns.max(initial=0) <= columns:
        return None
    other = state.copy_for(with_slices(problem, _most_steps(problem, columns)))
    return other if (other.free_bytes >= 0).all() else None


def in_cheapest_slices(problem: Problem) -> Problem:
    """Return the problem with units in slices that cost less by themselves; the same if none do.

    Costs with crowding do not show that, because they depend on what else is on a rank.
    """
    if problem.has_crowding:
        return problem
    whole = np.repeat(problem.num_steps, problem.num_steps)  # [N], of the shape's unit
    best, least_ms = whole, problem.processing_ms(problem.load)
    for columns in (columns for columns in SLICE_COLUMNS if columns >= MIN_CPU_COLUMNS):
        most_steps = _most_steps(problem, columns)
        if (most_steps >= whole).all():
            break
        total_ms = problem.processing_ms(with_slices(problem, most_steps).load)
        best = np.where(total_ms < least_ms, most_steps, best)
        least_ms = np.minimum(total_ms, least_ms)
    return problem if best is whole else with_slices(problem, best)


def in_spread_slices(
    state: State, columns: int, *, blocks: Literal["kept", "narrow", "none"] = "kept"
) -> State | None:
    """Return a state with all wider units in slices of `columns`, spread over the ranks.

    It is None if no unit is wider, or if nothing was found that fits.

    Args:
        blocks: which units stay in blocks, except those that must be replicas: all, those that are
            not wider, or none.
    """
    problem, cuts = state.problem, cuts_of(state)
    most_steps = _most_steps(problem, columns)
    of_unit = most_steps[problem.whole_shape]
    in_columns, is_wide = state.group == COLUMNS, problem.num_steps > of_unit
    changes = is_wide if blocks == "narrow" else is_wide & in_columns
    if blocks == "none":
        changes = is_wide | ~in_columns
    changes = changes & ~problem.must_replicate
    most_bytes = MOST_OF_RANK * int(problem.capacity_bytes.min())
    spread = list(cuts)
    for unit in np.flatnonzero(changes).tolist():
        widths = _spread(int(problem.num_steps[unit]), int(of_unit[unit]), problem.world_size)
        is_large = problem.size_bytes[problem.shape(unit, widths[0])] > most_bytes
        # What would take most of the smallest rank keeps the widths that fit.
        if len(widths) < problem.world_size or not is_large or not in_columns[unit]:
            spread[unit] = UnitCut(widths)
    if spread == list(cuts):
        return None
    return first_plan(with_slices(problem, most_steps), spread)


def _spread(steps: int, most: int, num_ranks: int) -> tuple[int, ...]:
    """Return the widths of pieces of whole slices, as many as there are slices or ranks.

    Args:
        steps: steps of the unit.
        most: steps of a slice; the last one has the rest.
    """
    num_slices, rest = divmod(steps, most)
    num_pieces = min(num_slices + (rest > 0), num_ranks)
    few, num_more = divmod(num_slices, num_pieces)
    widths = [most * (few + (piece < num_more)) for piece in range(num_pieces)]
    widths[-1] += rest
    return tuple(widths)


def with_slices(problem: Problem, most_steps: Indices) -> Problem:
    """Return the problem in which pieces wider than `most_steps` [N] are several equal shards."""
    num_steps = problem.num_steps
    first = np.repeat(problem.first_shape[:-1], num_steps)
    width = np.arange(len(first)) - first + 1
    steps = np.ones_like(width)
    for slice_steps in range(2, int(most_steps.max()) + 1):  # the last that divides is the widest
        steps[(width % slice_steps == 0) & (slice_steps <= most_steps)] = slice_steps
    num_slices, shape = width // steps, first + steps - 1

    def total(values: Floats) -> Floats:
        """Return the sums over the slices of every shape of values [N, ...]."""
        return (values[shape].T * num_slices).T

    return dataclasses.replace(
        problem,
        most_steps=most_steps,
        possible=problem.possible[shape],
        demand=total(problem.demand),
        load=total(problem.load),
        margin=total(problem.margin),
        shared_ms=total(problem.shared_ms),
        size_bytes=problem.size_bytes[shape] * num_slices,
    )


def _most_steps(problem: Problem, columns: int) -> Indices:
    """Return [N], the largest width of a slice in steps; the unit's if it cannot be sliced."""
    per_step = problem.columns_per_step
    dims = np.array([problem.task.tables[tables[0]].embedding_dim for tables in problem.tables])
    can_slice = (per_step > 0) & (dims % np.maximum(per_step, 1) == 0)
    most = np.maximum(columns // np.maximum(per_step, 1), 1)
    return np.repeat(np.where(can_slice, most, problem.num_steps), problem.num_steps)
