"""A sharder that reads an existing plan: from `dlrm-plan`, an earlier run, or written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dlrm_sharded.plans.plan import ShardingPlan, read_plan
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.plans.validation import validate


@dataclass(frozen=True, slots=True, eq=False)
class PlanFileSharder:
    """Returns the plan of a plan.json, if it is valid for the task."""

    name: ClassVar[str] = "plan_file"

    path: str | Path

    def shard(self, task: ShardingTask) -> ShardingPlan:
        plan = read_plan(self.path)
        validate(plan, task)
        return plan
