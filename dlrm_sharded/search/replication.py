"""Decides which units are worth replicating, and replicates them in a state.

A replica costs all ranks the same, so it pays off where it costs less than the unit does in the
mean over ranks. That is known without a plan. Moves decide the rest, as for any other layout.

Letters: U units.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.search.problem import Mask
from dlrm_sharded.search.state import COLUMNS, State


def which_pay(gain_ms: Floats, possible: Mask, first_ms: float) -> Mask:
    """Return [U], units whose replicas pay off, if they do so together.

    Args:
        gain_ms: [U], what the replica of a unit saves, apart from the price of the first one.
        first_ms: the price of the first replica.
    """
    pays: Mask = possible & (gain_ms > 0)
    return pays & (float(gain_ms[pays].sum()) > first_ms)


def replicate(state: State) -> bool:
    """Replicate every unit for which that may pay off and has room, those that gain most first.

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
        for rank in list(state.widths[unit]):
            state.set_width(unit, rank, 0)
        state.set_group(unit, replicas.groups[0])
        num_replicated += 1
    state.refresh()
    return num_replicated > 0
