"""The protocol of sharders: heuristics, searches, learned policies, and your own."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Protocol

from dlrm_sharded.cost.base import CostModel, WithCosts, cost_additive, is_additive
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan, with_exchanges_of
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask, in_half


class Sharder(Protocol):
    """Decides where tables go. Hyperparameters go to `__init__`, data to `shard`.

    `shard` is pure: the same task and seed give the same plan; it uses no device, no process group
    and no global random state, and it does not change the task. A sharder may have a `name`, which
    reports show; without it they show the name of its class. A sharder that sets the precision of
    tables or exchanges has `table_precision` or `exchange_precision`; the planner puts them into
    the task, see `in_stated_precision`.

    The plans of a sharder that is made with a `SharderContext` are assumed to depend on the run's
    cost model, unless it has `uses_costs = False`; those of any other sharder only if it has
    `uses_costs = True`. Reports name the costs by which it planned: its `costs`, or else those of
    the run's cost model, if it uses them.
    """

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Make a plan that `dlrm_sharded.plans.validation.validate` accepts.

        Raises:
            InfeasibleTaskError: no plan within the ranks' memory was found.
            InvalidPlanError: a plan that was made before does not suit the task.
        """


@dataclass(frozen=True, slots=True)
class SharderContext:
    """What a sharder may need to know about a run.

    A yaml with `_partial_: true` names a class or function whose first argument is this context;
    the keys of the yaml are its other arguments.

    Args:
        cost_model: the run's cost model; None with `cost_model=none`.
    """

    run: RunContext = field(default_factory=RunContext)
    cost_model: CostModel | None = None

    def costs_for(self, sharder: str) -> WithCosts:
        """Return the function that gives the tasks of a sharder their costs.

        Raises:
            ConfigError: the run has no additive cost model, which the sharder needs.
        """
        if not is_additive(self.cost_model):
            raise ConfigError(
                f"sharder={sharder} needs a cost model with a method `cost_task`; choose "
                "cost_model=learned, or sharder=neuroshard for cost_model=neuroshard"
            )
        return functools.partial(cost_additive, self.cost_model)

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a plan, with exchanges in the task's precision unless the plan sets its own.

        Raises:
            ConfigError: the run has no cost model.
        """
        if self.cost_model is None:
            raise ConfigError("cost_model is none, and the sharder predicts costs; choose another")
        return self.cost_model.predict(with_exchanges_of(plan, task), task)


def in_stated_precision(sharder: Sharder, task: ShardingTask) -> ShardingTask:
    """Return the task with the precisions that a sharder sets in place of the task's own."""
    exchange = getattr(sharder, "exchange_precision", None)
    if exchange is not None:
        task = dataclasses.replace(task, exchange_precision=exchange)
    return in_half(task) if getattr(sharder, "table_precision", None) == "fp16" else task


def sharder_name(sharder: Sharder) -> str:
    """Return the name that reports show."""
    return str(getattr(sharder, "name", type(sharder).__name__))
