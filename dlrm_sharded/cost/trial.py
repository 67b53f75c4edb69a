"""A trial of a cost model that was just read: it has to predict a few plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

MAX_TIME_MS = 1e9
"""Longest time of a stage that a model may predict for a trial plan: more than 11 days."""

_USED_ONCE = (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)
_TABLES = (
    Table("small", 10, 4, 1.0, _USED_ONCE),
    Table("large", 10**6, 128, 20.0, _USED_ONCE[::-1]),
)


def check_trial_plans(
    predict: Callable[[Workload], PlanCost], world_sizes: Sequence[int] = (1, 2)
) -> None:
    """Raise ValueError if a time of a trial plan is not finite, or is absurdly far from zero.

    On each number of ranks, one plan uses all of them, and one leaves ranks empty.
    """
    for world_size in world_sizes:
        tables = tuple(
            dataclasses.replace(table, name=f"{table.name}{rank}")
            for rank in range(world_size)
            for table in _TABLES
        )
        task = ShardingTask(tables, Topology(world_size, memory_bytes=2**50), batch_size=1024)
        for ranks in ([i % world_size for i in range(len(tables))], [0] * len(tables)):
            cost = predict(workload_of_plan(ShardingPlan.from_ranks(task, ranks), task))
            times = [rank.stage_ms(stage) for rank in cost.per_rank for stage in STAGES]
            for time_ms in (*times, *(cost.input_dist_ms or ())):
                if not abs(time_ms) <= MAX_TIME_MS:  # nor is it NaN
                    raise ValueError(f"it predicts {time_ms} ms for a plan on {world_size} ranks")
