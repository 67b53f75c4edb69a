"""From a task to a plan that can be trained, with what it will cost."""

from __future__ import annotations

import dataclasses

from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.plan import ShardingPlan, validate
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.task import ShardingTask


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """A sharder, and the cost model that judges its plans.

    Args:
        cost_model: predicts the plan's cost; None where nothing is to be predicted.
    """

    sharder: Sharder
    cost_model: CostModel | None

    def plan(self, task: ShardingTask) -> ShardingPlan:
        """The sharder's plan, validated, with its predicted cost and how near that is to the least.

        Raises:
            ShardingError: there is no plan, or the sharder's cannot be trained.
            ConfigError: the sharder gave something else.
        """
        plan = self.sharder.shard(task)
        if not isinstance(plan, ShardingPlan):
            name = type(self.sharder).__name__
            raise ConfigError(f"{name}.shard gave {plan!r}, not a ShardingPlan")
        validate(plan, task)
        if self.cost_model is None:
            return plan
        predicted = plan.predicted or self.cost_model.predict(plan, task)
        plan = dataclasses.replace(plan, predicted=predicted)
        if isinstance(self.cost_model, LearnedCostModel):
            bound_ms = lower_bound_ms(task, self.cost_model)
            gap = predicted.cost_ms / bound_ms - 1.0 if bound_ms > 0 else None
            plan = dataclasses.replace(plan, lower_bound_ms=bound_ms, gap=gap)
        return plan

    def predict_input_dist_ms(
        self, plan: ShardingPlan, task: ShardingTask
    ) -> tuple[float, ...] | None:
        """Redistribution of the ids on every rank; None where nothing is predicted."""
        if self.cost_model is None:
            return None
        return self.cost_model.predict_input_dist_ms(plan, task)
