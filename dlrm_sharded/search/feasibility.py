"""Proofs that no plan fits the ranks."""

from __future__ import annotations

import numpy as np

from dlrm_sharded.plans.tables import COLUMN_MULTIPLE
from dlrm_sharded.plans.task import GIB, MEMORY_KEYS
from dlrm_sharded.plans.validation import fp16_advice, why_sequence_too_wide, why_too_large
from dlrm_sharded.search.problem import Problem, by_group


def why_infeasible(problem: Problem) -> str | None:
    """Return a proof that no plan fits the ranks' memory and lookups; None if none was found.

    Plans have the columns of a table on a rank in one shard, or in equal ones that lookups support.
    """
    size, capacity = problem.size_bytes[problem.whole_shape], problem.capacity_bytes
    if reason := why_too_large(problem.task, capacity.tolist()):
        return reason
    if reason := _why_too_wide(problem):
        return reason
    for unit in range(problem.num_units):
        smallest = _smallest_piece_bytes(problem, unit)
        if problem.allowed is None and smallest <= capacity.min():
            continue
        allowed = np.True_ if problem.allowed is None else problem.allowed[unit]
        memory = capacity[np.broadcast_to(allowed, capacity.shape)]
        columns_may_fit = smallest <= memory.max() and size[unit] <= memory.sum()
        if columns_may_fit or _row_blocks_may_fit(problem, unit):
            continue
        tables = problem.task.tables
        names = ", ".join(repr(tables[index].name) for index in problem.tables[unit])
        return (
            f"no plan can fit: {names} needs {size[unit]:,} B, in pieces of {smallest:,} B or "
            f"more, and its {len(memory)} ranks have {memory.max():,} B or less each; add ranks or "
            f"memory ({MEMORY_KEYS}), cap the table's rows, or drop constraints"
        )
    return None


def why_none_found(problem: Problem) -> str:
    """Return a proof that no plan fits, or else a sentence that none was found."""
    used, capacity = problem.task.table_bytes, int(problem.capacity_bytes.sum())
    return why_infeasible(problem) or (
        f"no plan was found for {len(problem.task.tables)} tables of {used:,} B "
        f"({used / GIB:.2f} GiB) on {problem.world_size} ranks with {capacity:,} B in all; that "
        f"there is none is not proven. Add ranks or memory ({MEMORY_KEYS}), or drop constraints"
        f"{fp16_advice(problem.task, capacity)}"
    )


def _why_too_wide(problem: Problem) -> str | None:
    """Return why a unit has too few ranks for pieces that lookups support."""
    max_columns = problem.task.topology.max_shard_columns
    for unit in np.flatnonzero(~problem.possible[problem.whole_shape]).tolist():
        num_ranks = problem.world_size
        if problem.allowed is not None:
            num_ranks = int(problem.allowed[unit].sum())
        too_few = num_ranks * problem.max_width(unit) < problem.num_steps[unit]
        if too_few:
            tables = [problem.task.tables[i] for i in problem.tables[unit]]
            if not tables[0].pooled:
                return why_sequence_too_wide(tables[0], problem.task.topology)
            names = ", ".join(repr(table.name) for table in tables)
            if problem.columns_per_step[unit] and problem.allowed is None:
                return (
                    f"table {names} has {tables[0].embedding_dim:,} columns, and FBGEMM looks up "
                    f"shards of {max_columns:,} columns or fewer on "
                    f"{problem.task.topology.compute_device}: with {num_ranks} ranks it cannot be "
                    "cut into equal shards; make its embedding_dim a multiple of "
                    f"{problem.columns_per_step[unit]}, or add ranks"
                )
            return (
                f"constraints allow {names} to be on {num_ranks} ranks"
                f"{'' if problem.columns_per_step[unit] else ', and not to be split'}, but shards "
                f"have {max_columns:,} columns or fewer on {problem.task.topology.compute_device} "
                "(FBGEMM); drop sharder.pin, together or unsplit of these tables"
            )
    return None


def _smallest_piece_bytes(problem: Problem, unit: int) -> int:
    """Return the size of the smallest column shard of a unit in any plan, not only in steps."""
    table = problem.task.tables[problem.tables[unit][0]]
    if not problem.columns_per_step[unit]:
        return int(problem.size_bytes[problem.whole_shape[unit]])
    return problem.task.topology.shard_bytes(
        table.name, table.num_embeddings, COLUMN_MULTIPLE, precision=table.precision
    )


def _row_blocks_may_fit(problem: Problem, unit: int) -> bool:
    """Return whether the unit's row blocks may fit some group."""
    for blocks in problem.blocks:
        if blocks.possible[unit]:
            # The last rank of a group is left out: its block may be smaller than the others.
            memory = by_group(problem.capacity_bytes, blocks.group_size)[:, :-1]
            if blocks.size_bytes[unit, 0] <= memory.min(axis=1).max():
                return True
    return False
