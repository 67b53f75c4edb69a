"""What a cost model is to those who plan and report with it."""

from __future__ import annotations

from typing import Protocol

from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.task import ShardingTask


class CostModel(Protocol):
    """Predicts what `cost.measure` would measure. Built with all that it needs to know."""

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """The four stages of every rank under a valid plan."""

    def predict_input_dist_ms(
        self, plan: ShardingPlan, task: ShardingTask
    ) -> tuple[float, ...] | None:
        """Redistribution of the ids on every rank, no part of the cost; None if not modelled."""
