"""A sharder that reads an existing plan, from `dlrm-plan`, an earlier run, or your own hand."""

from __future__ import annotations

from pathlib import Path

from dlrm_sharded.plans.plan import ShardingPlan, read_plan
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.plans.validation import validate


class PlanFileSharder:
    """Returns the plan of a plan.json, if it is one for the task."""

    name = "plan_file"

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def shard(self, task: ShardingTask) -> ShardingPlan:
        plan = read_plan(self._path)
        validate(plan, task)
        return plan
