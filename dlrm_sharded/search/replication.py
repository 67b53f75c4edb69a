"""Construct: replicate the units for which that may pay off.

A replica costs all ranks the same, so it pays off if it costs less than the unit does in the mean
over ranks. That is known without a plan. Moves decide the rest, as for any other layout.

Letters: U units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_sharded.search.cuts import UnitCut
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State


def with_replicas(problem: Problem, cuts: Sequence[UnitCut]) -> tuple[UnitCut, ...]:
    """Return cuts with replicas of the units that gain most per byte, while memory lasts.

    The other units are placed later, in the memory that is left.
    """
    replicas = problem.replicas
    if replicas is None:
        return tuple(cuts)
    size = problem.size_bytes[problem.whole_shape]
    replica_bytes = replicas.size_bytes[:, 0]
    found, least_bytes = list(cuts), int(problem.capacity_bytes.min())
    free_bytes = int(problem.capacity_bytes.sum() - size.sum())
    units = np.flatnonzero(replicas.possible & (problem.replica_gain_ms > 0))
    per_byte = problem.replica_gain_ms[units] / replica_bytes[units]
    for unit in units[np.argsort(-per_byte, kind="stable")].tolist():
        more_bytes = problem.world_size * int(replica_bytes[unit]) - int(size[unit])
        if more_bytes <= free_bytes and replica_bytes[unit] <= least_bytes:
            free_bytes -= more_bytes
            least_bytes -= int(replica_bytes[unit])
            found[unit] = UnitCut(kind=len(problem.blocks) - 1)  # the last kind
    return tuple(found)


def replicate(state: State) -> bool:
    """Replicate every unit for which that may pay off and that fits, those that gain most first.

    Returns:
        Whether any unit was replicated.
    """
    problem, replicas = state.problem, state.problem.replicas
    if replicas is None:
        return False
    pays = replicas.possible & (problem.replica_gain_ms > 0)
    candidates = np.flatnonzero(pays & (state.group == COLUMNS))
    candidates = candidates[np.argsort(-problem.replica_gain_ms[candidates], kind="stable")]
    free_bytes, num_replicated = state.free_bytes.copy(), 0
    for unit in candidates.tolist():
        size_bytes = int(replicas.size_bytes[unit, 0])
        after = free_bytes - size_bytes
        for rank, width in state.widths[unit].items():
            after[rank] += problem.size_bytes[problem.shape(unit, width)]
        if after.min() < 0:
            continue
        free_bytes = after
        state.remove_columns(unit)
        state.set_group(unit, replicas.groups[0])
        num_replicated += 1
    state.refresh()
    return num_replicated > 0
