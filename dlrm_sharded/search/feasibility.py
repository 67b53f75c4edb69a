"""Proofs that no plan fits the memory of the ranks."""

from __future__ import annotations

import numpy as np

from dlrm_sharded.search.problem import Problem, by_group
from dlrm_sharded.tables import COLUMN_MULTIPLE
from dlrm_sharded.task import MEMORY_KEYS
from dlrm_sharded.validation import why_too_large


def why_infeasible(problem: Problem) -> str | None:
    """Return a proof that no plan fits the ranks' memory; None if no proof was found."""
    size, capacity = problem.size_bytes[problem.whole_shape], problem.capacity_bytes
    if reason := why_too_large(int(size.sum()), capacity.tolist()):
        return reason
    for unit in range(problem.num_units):
        smallest = _smallest_piece_bytes(problem, unit)
        if problem.allowed is None and smallest <= capacity.min():
            continue
        allowed = np.True_ if problem.allowed is None else problem.allowed[unit]
        room = capacity[np.broadcast_to(allowed, capacity.shape)]
        columns_may_fit = smallest <= room.max() and size[unit] <= room.sum()
        if columns_may_fit or _row_blocks_may_fit(problem, unit):
            continue
        tables = problem.task.tables
        names = ", ".join(repr(tables[index].name) for index in problem.tables[unit])
        return (
            f"no plan can fit: {names} needs {size[unit]:,} B, in pieces of {smallest:,} B or "
            f"more, and its {len(room)} ranks have {room.max():,} B or less each; add ranks or "
            f"memory ({MEMORY_KEYS}), cap the table's rows, or drop constraints"
        )
    return None


def _smallest_piece_bytes(problem: Problem, unit: int) -> int:
    """Return the size of the smallest column shard that a plan may have, in steps or not."""
    if not problem.columns_per_step[unit]:
        return int(problem.size_bytes[problem.whole_shape[unit]])
    table = problem.task.tables[problem.tables[unit][0]]
    return problem.task.topology.shard_bytes(table.num_embeddings, COLUMN_MULTIPLE)


def _row_blocks_may_fit(problem: Problem, unit: int) -> bool:
    """Return whether some group may have room for the unit's row blocks."""
    if problem.world_size == 1:
        return False
    for blocks in problem.blocks:
        if blocks.possible[unit]:
            # The last rank of a group is left out: its block may be smaller than the others.
            room = by_group(problem.capacity_bytes, blocks.group_size)[:, :-1]
            if blocks.size_bytes[unit, 0] <= room.min(axis=1).max():
                return True
    return False
