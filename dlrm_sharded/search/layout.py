"""From a state to shards: which columns a piece has, and what moves from an earlier plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrm_sharded.layouts import is_row_wise, row_blocks
from dlrm_sharded.plan import Shard
from dlrm_sharded.search.state import COLUMNS, ROWS, State
from dlrm_sharded.task import ShardingTask

Earlier = Mapping[str, Sequence[Shard]]
"""Shards of an earlier plan, by table."""


def shards_of(state: State, earlier: Earlier | None = None) -> tuple[Shard, ...]:
    """The shards of a state.

    Args:
        earlier: tables that lie as they lay keep these shards; of others, columns stay on their
            rank as far as that goes without cutting more.
    """
    shards: list[Shard] = []
    for unit in range(state.problem.num_units):
        shards += shards_of_unit(state, unit, earlier)
    return tuple(shards)


def shards_of_unit(state: State, unit: int, earlier: Earlier | None = None) -> list[Shard]:
    """Those of a unit's tables."""
    problem = state.problem
    mode = int(state.mode[unit])
    shards = []
    for index in problem.tables[unit]:
        table = problem.task.tables[index]
        before = () if earlier is None else earlier[table.name]
        if mode != COLUMNS:
            ranks = range(*state.ranks_of_mode(mode).indices(problem.world_size))
            blocks = row_blocks(table.num_embeddings, len(ranks))
            columns = (0, table.embedding_dim)
            shards += [
                Shard(table.name, rank, rows, columns)
                for rank, rows in zip(ranks, blocks, strict=True)
            ]
            continue
        step = int(problem.step[unit]) or table.embedding_dim
        steps = state.widths[unit]
        if before and not is_row_wise(before, table) and _steps(before, step) == steps:
            shards += before
            continue
        first_column = {shard.rank: shard.cols[0] for shard in reversed(before)}
        start = 0
        for rank in sorted(steps, key=lambda r: (first_column.get(r, table.embedding_dim), r)):
            stop = min(start + steps[rank] * step, table.embedding_dim)
            shards.append(Shard(table.name, rank, (0, table.num_embeddings), (start, stop)))
            start = stop
    return shards


def moved_bytes(task: ShardingTask, before: Sequence[Shard], after: Sequence[Shard]) -> int:
    """Memory of what a table has on ranks that did not have it before."""
    topology, moved = task.topology, 0
    for shard in after:
        moved += shard.bytes_on(topology)
        for old in before:
            rows = min(shard.rows[1], old.rows[1]) - max(shard.rows[0], old.rows[0])
            cols = min(shard.cols[1], old.cols[1]) - max(shard.cols[0], old.cols[0])
            if shard.rank == old.rank and rows > 0 and cols > 0:
                moved -= topology.shard_bytes(rows, cols)
    return max(moved, 0)


def state_of(state: State, earlier: Earlier) -> bool:
    """Put everything where an earlier plan has it; False where the state may not hold that."""
    problem = state.problem
    per_host = problem.hosts.ranks_per_host
    for unit, tables in enumerate(problem.tables):
        names = [problem.task.tables[index].name for index in tables]
        ranks = {shard.rank for name in names for shard in earlier[name]}
        table = problem.task.tables[tables[0]]
        shards = earlier[names[0]]
        if len(tables) > 1 or not problem.step[unit]:
            if len(ranks) > 1 or any(len(earlier[name]) > 1 for name in names):
                return False
            state.set_width(unit, min(ranks), 1)
        elif is_row_wise(shards, table):
            mode = ROWS if len(shards) == problem.world_size else min(ranks) // per_host
            if not state.blocks(mode).possible[unit]:
                return False
            state.set_mode(unit, mode)
        else:
            widths = _steps(shards, int(problem.step[unit]))
            if sum(widths.values()) != problem.num_steps[unit]:
                return False
            for rank, width in widths.items():
                state.set_width(unit, rank, width)
            for shard in shards:  # each has optimizer state of its own, the state counts one a rank
                state.free_bytes[shard.rank] -= problem.task.topology.shard_bytes(shard.num_rows, 0)
            for rank in widths:
                state.free_bytes[rank] += problem.task.topology.shard_bytes(table.num_embeddings, 0)
        if problem.allowed is not None and not problem.allowed[unit, list(ranks)].all():
            return False
    state.refresh()
    state.log.clear()
    return bool((state.free_bytes >= 0).all() and (state.apart_count <= 1).all())


def _steps(shards: Sequence[Shard], step: int) -> dict[int, int]:
    """Columns of each rank, in steps: no fewer than it has."""
    columns: dict[int, int] = {}
    for shard in shards:
        columns[shard.rank] = columns.get(shard.rank, 0) + shard.num_cols
    return {rank: -(-width // step) for rank, width in columns.items()}
