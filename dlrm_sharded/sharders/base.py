"""The protocol of sharders: heuristics, searches, learned policies, and your own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask


class Sharder(Protocol):
    """Decides where tables go. Hyperparameters go to `__init__`, data to `shard`.

    `shard` is pure: the same task and seed give the same plan; it uses no device, no process group
    and no global random state, and it does not change the task. A sharder may have a `name`, which
    reports show; without it they show the name of its class. One that chooses the precision of
    exchanges says so by `chooses_exchange_precision = True`; the plans of others get the run's.
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
        cost_model: the run's cost model, for exchanges in the run's precision; None with
            `cost_model=none`.
    """

    run: RunContext = field(default_factory=RunContext)
    cost_model: CostModel | None = None


def sharder_name(sharder: Sharder) -> str:
    """Return the name that reports show."""
    return str(getattr(sharder, "name", type(sharder).__name__))


def chooses_precision(sharder: Sharder) -> bool:
    """Return whether the precision of exchanges in the sharder's plans is its choice."""
    return bool(getattr(sharder, "chooses_exchange_precision", False))
