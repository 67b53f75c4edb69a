"""A plan to simulate, with what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import PlanReport


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of one sharder, and its report, which has the predicted cost.

    Args:
        sharder: name of the sharder, with its settings.
    """

    sharder: str
    plan: ShardingPlan
    report: PlanReport

    @property
    def cost(self) -> PlanCost:
        """Predicted cost of the plan; planners without a cost model are refused."""
        assert self.report.cost is not None
        return self.report.cost

    @property
    def cost_error(self) -> float | None:
        """Expected relative error of the predicted cost; None if it is not known."""
        return None if self.report.standing is None else self.report.standing.error
