"""A trial of a cost model that was just read: it must predict the cost of a few shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dlrm_sharded.cost.workload import TableArrays, Workload
from dlrm_sharded.plans.layouts import REPLICA_GROUP
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import Topology

MAX_TIME_MS = 1e9
"""Longest time of a stage that a model may predict for the trial: more than 11 days."""

_NONE = (0.0,) * (NUM_REUSE_BINS - 1)
_TABLES = (
    Table("small", 10, 4, 1.0, (1.0, *_NONE)),
    Table("large", 10**6, 128, 20.0, (*_NONE, 1.0)),
)


def try_predicting(
    predict: Callable[[Workload], PlanCost], world_sizes: Sequence[int] = (1, 2)
) -> None:
    """Raise ValueError if a predicted time is not finite, or is absurdly far from zero.

    Ranks have every table whole, as a row block, and as a replica, so that all costs are used.
    """
    for size in world_sizes:
        arrays = TableArrays(_TABLES, Topology(size, memory_bytes=1), batch_size=1024)
        kinds = np.meshgrid(range(len(_TABLES)), range(size), [1, size, REPLICA_GROUP])
        table, rank, group_size = (grid.ravel() for grid in kinds)
        sizes = arrays.num_rows[table], arrays.num_cols[table]
        cost = predict(arrays.workload(table, *sizes, rank, group_size))
        times = [stages.stage_ms(stage) for stages in cost.per_rank for stage in STAGES]
        for time_ms in (*times, *(cost.input_dist_ms or ())):
            if not abs(time_ms) <= MAX_TIME_MS:  # nor is it NaN
                raise ValueError(f"it predicts {time_ms} ms for shards on {size} ranks")
