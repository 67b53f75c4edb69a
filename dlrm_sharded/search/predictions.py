"""What a search asks of a cost model that only predicts plans: the costs of many plans at once.

Letters: n plans, W ranks, P parts of a rank's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.base import CostModel, predict_plans
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import BACKWARD_STAGES, EXCHANGE_STAGES, STAGES, PlanCost
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.stopping import Clock

BATCH = 64
"""Largest number of plans that a model predicts between two looks at the clock."""

COMPUTE_PARTS, EXCHANGE_PART = slice(0, 2), 2
"""Parts of a rank's time: forward computation, backward computation, and all exchanges."""

_STAGES_OF_PARTS = np.array(
    [
        [
            stage not in EXCHANGE_STAGES and stage not in BACKWARD_STAGES,
            stage not in EXCHANGE_STAGES and stage in BACKWARD_STAGES,
            stage in EXCHANGE_STAGES,
        ]
        for stage in STAGES
    ],
    dtype=np.float64,
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """A cost model that is asked about plans of one task until the time is over."""

    model: CostModel
    task: ShardingTask
    exchange_precision: ExchangePrecision
    clock: Clock

    def costs(self, plans: Sequence[tuple[Shard, ...]]) -> list[PlanCost]:
        """Predict plans of these shards; fewer of them if the time is over."""
        costs = list[PlanCost]()
        for first in range(0, len(plans), BATCH):
            if self.clock.is_over:
                break
            costs += self._together(plans[first : first + BATCH])
        return costs

    def cost(self, plan: tuple[Shard, ...]) -> PlanCost:
        """Predict the plan of these shards, even if the time is over."""
        return self._together([plan])[0]

    def _together(self, plans: Sequence[tuple[Shard, ...]]) -> list[PlanCost]:
        world_size, precision = self.task.topology.world_size, self.exchange_precision
        made = [ShardingPlan(world_size, shards, precision) for shards in plans]
        return predict_plans(self.model, made, self.task)


def parts_ms(costs: Sequence[PlanCost], world_size: int) -> Floats:
    """Return [n, W, P], the parts of the ranks' times."""
    by_stage = [[[r.stage_ms(s) for s in STAGES] for r in cost.per_rank] for cost in costs]
    shape = (len(costs), world_size, len(STAGES))
    parts: Floats = np.array(by_stage, dtype=np.float64).reshape(shape) @ _STAGES_OF_PARTS
    return parts
