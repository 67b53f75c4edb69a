"""The protocol of sharders: heuristics, searches, learned policies, and your own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.base import CostModel, PricedTask, is_additive, with_assumed_profiles
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask

PriceTask = Callable[[ShardingTask], PricedTask]


class Sharder(Protocol):
    """Decides where tables go. Hyperparameters go to `__init__`, data to `shard`.

    `shard` is pure: the same task and seed give the same plan; it uses no device, no process group
    and no global random state, and it does not change the task. A sharder may have a `name`, which
    reports show; without it they show the name of its class. One that chooses the precision of
    exchanges says so by `chooses_exchange_precision = True`; the plans of others get the run's.
    A sharder that is made with a `SharderContext` counts as one whose plans depend on the run's
    cost model, unless it says `uses_costs = False`; any other one does if it says
    `uses_costs = True`. Reports name the costs that it planned by: `costs` of the sharder, or else
    those of the run's cost model, if it uses them.
    """

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Make a plan that `dlrm_sharded.plans.validation.validate` accepts.

        Raises:
            InfeasibleTaskError: no plan within the ranks' memory was found.
            InvalidPlanError: a plan that was made before does not suit the task.
        """


@dataclass(frozen=True, slots=True)
class SharderContext:
    """Facts about a run that a sharder may need.

    A yaml with `_partial_: true` names a class or function whose first argument is this context;
    the keys of the yaml are its other arguments.

    Args:
        cost_model: the run's cost model; None with `cost_model=none`.
        exchange_precision: the run's precision of exchanges.
    """

    run: RunContext = field(default_factory=RunContext)
    cost_model: CostModel | None = None
    exchange_precision: ExchangePrecision = FP32_EXCHANGE

    def pricing_for(self, sharder: str) -> PriceTask:
        """Return the function that prices tasks, in the run's precision, for a sharder.

        Raises:
            ConfigError: the run has no additive cost model, which the sharder needs.
        """
        if not is_additive(self.cost_model):
            raise ConfigError(
                f"sharder={sharder} needs a cost model with a method `price`; choose "
                "cost_model=learned, or sharder=neuroshard for cost_model=neuroshard"
            )
        return functools.partial(self.cost_model.price, exchange_precision=self.exchange_precision)

    def with_profiles(self, task: ShardingTask) -> ShardingTask:
        """Return the task with an access profile for every table: what the cost model assumes.

        Without a model that assumes any, it is a Zipf distribution, as for `with_profiles`.
        """
        return with_profiles(with_assumed_profiles(self.cost_model, task))

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a plan, which has the run's precision unless it has one of its own.

        Raises:
            ConfigError: the run has no cost model.
        """
        if self.cost_model is None:
            raise ConfigError("cost_model is none, and the sharder predicts costs; choose another")
        return self.cost_model.predict(in_precision(plan, self.exchange_precision), task)


def in_precision(plan: ShardingPlan, precision: ExchangePrecision) -> ShardingPlan:
    """Return a plan with exchanges in a precision, unless the plan has one of its own."""
    if not plan.exchange_precision.is_exact:
        return plan
    return dataclasses.replace(plan, exchange_precision=precision)


def sharder_name(sharder: Sharder) -> str:
    """Return the name that reports show."""
    return str(getattr(sharder, "name", type(sharder).__name__))


def chooses_precision(sharder: Sharder) -> bool:
    """Return whether the precision of exchanges in the sharder's plans is its choice."""
    return bool(getattr(sharder, "chooses_exchange_precision", False))


def uses_costs(sharder: Sharder, *, has_context: bool) -> bool:
    """Return whether a sharder's plans depend on the run's cost model.

    Args:
        has_context: whether the sharder was made with a `SharderContext`.
    """
    stated = getattr(sharder, "uses_costs", None)
    return has_context if stated is None else bool(stated)
