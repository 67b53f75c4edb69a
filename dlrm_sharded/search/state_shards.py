"""Converts states to shards of plans and back, and computes what moves between two plans."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from dlrm_sharded.plans.layouts import (
    ColumnShards,
    is_replicated,
    is_row_wise,
    layout_of,
    num_equal_shards,
)
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.search.problem import Demand
from dlrm_sharded.search.state import COLUMNS, State

ShardsByTable = Mapping[str, Sequence[Shard]]


def state_shards(state: State, earlier: ShardsByTable | None = None) -> tuple[Shard, ...]:
    """Return the shards of a state.

    Args:
        earlier: shards of an earlier plan. Tables that lie as in that plan keep these shards; the
            columns of other tables stay on their ranks if that needs no more cuts.
    """
    shards: list[Shard] = []
    for unit in range(state.problem.num_units):
        shards += unit_shards(state, unit, earlier)
    return tuple(shards)


def unit_shards(state: State, unit: int, earlier: ShardsByTable | None = None) -> list[Shard]:
    """Return the shards of a unit's tables."""
    problem, group, widths = state.problem, int(state.group[unit]), state.widths[unit]
    shards: list[Shard] = []
    for index in problem.tables[unit]:
        table = problem.task.tables[index]
        if group != COLUMNS:
            shards += problem.groups[group].layout.shards(table)
            continue
        step = int(problem.columns_per_step[unit]) or table.embedding_dim
        before = () if earlier is None else earlier[table.name]
        slices = {rank: problem.slice_steps(unit, width) for rank, width in widths.items()}
        shards += _column_shards(table, widths, step, before, slices, problem.task.topology)
    return shards


def _column_shards(
    table: Table,
    widths: Mapping[int, int],
    step: int,
    before: Sequence[Shard],
    slices: Mapping[int, int],
    topology: Topology,
) -> list[Shard]:
    """Return column shards of these widths in steps, by rank, close to those before.

    Columns that are too many for a lookup become equal shards.

    Args:
        slices: steps of each slice of a rank's columns.
    """
    in_columns = not is_row_wise(before, table) and not is_replicated(before)
    if before and in_columns and _widths(before, step) == widths:
        return list(before)
    # Ranks come in the order of the columns that they had; new ranks come last.
    # Of several shards on one rank, the first counts: later entries overwrite earlier ones.
    first_column = {shard.rank: shard.cols[0] for shard in reversed(before)}
    ranks = sorted(widths, key=lambda r: (first_column.get(r, table.embedding_dim), r))
    by_rank: list[tuple[int, int]] = []
    for rank in ranks:
        # The last step of a table may have fewer columns than the others.
        num_cols = min(slices[rank] * step, table.embedding_dim)
        num_shards = num_equal_shards(num_cols, topology)
        num_slices = widths[rank] // slices[rank]
        by_rank += [(rank, num_cols // num_shards)] * (num_slices * num_shards)
    return ColumnShards.shards(table, by_rank)


def moved_bytes(task: ShardingTask, before: Sequence[Shard], after: Sequence[Shard]) -> int:
    """Return the bytes of a table on ranks that did not hold these bytes before.

    A replica's gradients do not count, because they are not sent.
    """
    moved = 0
    for shard in after:
        size = functools.partial(task.topology.shard_bytes, shard.table, precision=shard.precision)
        moved += size(shard.num_rows, shard.num_cols)
        for old in before:
            rows = min(shard.rows[1], old.rows[1]) - max(shard.rows[0], old.rows[0])
            cols = min(shard.cols[1], old.cols[1]) - max(shard.cols[0], old.cols[0])
            # What overlaps the old shard on the same rank stays.
            if shard.rank == old.rank and rows > 0 and cols > 0:
                moved -= size(rows, cols)
    return max(moved, 0)


def load_plan(state: State, plan: ShardsByTable) -> bool:
    """Put every unit of an empty state where a plan has it.

    Returns:
        Whether the state may hold the plan; if not, it is left incomplete.
    """
    problem = state.problem
    for unit, tables in enumerate(problem.tables):
        shards_of_tables = [plan[problem.task.tables[index].name] for index in tables]
        ranks = {shard.rank for shards in shards_of_tables for shard in shards}
        shards, table = shards_of_tables[0], problem.task.tables[tables[0]]
        if is_row_wise(shards, table) or is_replicated(shards):
            layout = layout_of(shards, table, problem.task.topology)
            # row blocks of pooled tables and of sequences have groups of their own
            group = next(
                (
                    i
                    for i, g in enumerate(problem.groups)
                    if g.layout == layout and problem.blocks[g.kind].possible[unit]
                ),
                None,
            )
            if group is None:
                return False
            state.set_group(unit, group)
        elif not problem.columns_per_step[unit]:
            if len(ranks) > 1 or any(len(shards) > 1 for shards in shards_of_tables):
                return False
            state.set_width(unit, min(ranks), 1)
        elif not _load_columns(state, unit, shards):
            return False
        if problem.allowed is not None and not problem.allowed[unit, list(ranks)].all():
            return False
    state.settle()
    return bool((state.free_bytes >= 0).all() and (state.separated_count <= 1).all())


def _load_columns(state: State, unit: int, shards: Sequence[Shard]) -> bool:
    problem, topology = state.problem, state.problem.task.topology
    widths = _widths(shards, int(problem.columns_per_step[unit]))
    # Widths are rounded up: shards whose widths are not multiples of a step do not add up.
    if sum(widths.values()) != problem.num_steps[unit]:
        return False
    shapes = {rank: problem.shape(unit, width) for rank, width in widths.items()}
    # Several shards on one rank become one piece, which may be too wide.
    if not problem.possible[list(shapes.values())].all():
        return False
    for rank, width in widths.items():
        state.set_width(unit, rank, width)
    # Each shard has its own optimizer state per row; the state counted only that of the piece.
    bytes_of_no_columns = topology.shard_bytes(shards[0].table, shards[0].num_rows, 0)
    for shard in shards:
        state.free_bytes[shard.rank] -= bytes_of_no_columns
    for rank, shape in shapes.items():
        num_shards = int(problem.demand[shape, Demand.NUM_SHARDS])
        state.free_bytes[rank] += bytes_of_no_columns * num_shards
    return True


def _widths(shards: Sequence[Shard], step: int) -> dict[int, int]:
    """Return the columns of each rank in steps, rounded up."""
    columns: dict[int, int] = {}
    for shard in shards:
        columns[shard.rank] = columns.get(shard.rank, 0) + shard.num_cols
    return {rank: -(-width // step) for rank, width in columns.items()}
