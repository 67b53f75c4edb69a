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
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, EXCHANGE_STAGES, FORWARD_STAGES, PlanCost
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.problem import LoadWeights
from dlrm_sharded.search.stopping import Clock

BATCH = 64
"""Largest number of plans that a model predicts between two looks at the clock."""

COMPUTE, EXCHANGE = slice(0, 2), slice(2, 3)
"""Parts of a rank's time: forward and backward computation, and all exchanges."""

_PARTS = (
    [stage for stage in COMPUTE_STAGES if stage in FORWARD_STAGES],
    [stage for stage in COMPUTE_STAGES if stage not in FORWARD_STAGES],
    EXCHANGE_STAGES,
)

Shards = tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Predictions:
    """A cost model that is asked about plans of one task until the time is over."""

    model: CostModel
    task: ShardingTask
    exchange_precision: ExchangePrecision
    clock: Clock

    def costs(self, plans: Sequence[Shards]) -> list[PlanCost]:
        """Predict plans of these shards; TimeoutError if the time is over."""
        costs = list[PlanCost]()
        for first in range(0, len(plans), BATCH):
            if self.clock.is_over:
                raise TimeoutError
            costs += self.at_once(plans[first : first + BATCH])
        return costs

    def at_once(self, plans: Sequence[Shards]) -> list[PlanCost]:
        """Predict plans of these shards even if the time is over."""
        world_size, precision = self.task.topology.world_size, self.exchange_precision
        made = [ShardingPlan(world_size, shards, precision) for shards in plans]
        return predict_plans(self.model, made, self.task)

    def parts_ms(self, plans: Sequence[Shards]) -> Floats:
        """Return [n, W, P], parts of the ranks' times; TimeoutError if the time is over."""
        return parts_ms(self.costs(plans), self.task.topology.world_size)


def parts_ms(costs: Sequence[PlanCost], world_size: int) -> Floats:
    """Return [n, W, P], parts of the ranks' times."""
    ranks = [[[sum(map(rank.stage_ms, p)) for p in _PARTS] for rank in c.per_rank] for c in costs]
    return np.array(ranks, dtype=np.float64).reshape(len(costs), world_size, len(_PARTS))


def loads_of(parts: Floats, weights: LoadWeights) -> Floats:
    """Return the loads [..., L] of parts [..., P] of times."""
    loads: Floats = parts[..., COMPUTE] @ weights.compute
    return loads + parts[..., EXCHANGE] * weights.exchange
