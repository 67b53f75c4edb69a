"""A task for a sharder, and what comes of it."""

from __future__ import annotations

import hashlib
import inspect
import json
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.cost.base import price
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.price_file import prices_digest
from dlrm_sharded.explain.diagnosis import shard_costs
from dlrm_sharded.plans.plan import Shard, ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner

KIB_PER_MIB = 1024
"""`ru_maxrss` is in KiB on Linux."""


@dataclass(frozen=True, slots=True)
class Case:
    """A task that a sharder is to plan.

    Args:
        task_name, sharder: their names in tables and paths.
        kind: group of the task within its set; "" if the set has none.
        prices: hash of what the cost model predicts from, the same for all sharders of a task.
        topology: name of the topology that the task was put on; "" for its own.
    """

    task_name: str
    sharder: str
    task: ShardingTask
    planner: Planner
    kind: str = ""
    prices: str = ""
    topology: str = ""

    def key(self) -> str:
        """Return a hash of all that the plan and its cost follow from."""
        options = self.planner.options
        return digest(
            [self.task_name, self.sharder, self.task.to_json(), self.prices],
            source_digest(self.planner.sharder, options),
            str(self.planner.exchange_precision),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plan that a sharder made for a task, or why it made none.

    Args:
        solve_s: time of the sharder; without a plan, the time until that was known.
        limit_s: time that it had.
        error: why there is no plan; None if there is one.
        is_infeasible: whether the sharder says that no plan fits.
        cost: predicted cost of the plan, by the cost model that all sharders share.
        lower_bound_ms: lower bound of the cost of all plans, which this sharder's report proves.
        shards: shards of the plan.
        shard_ms: time that each shard adds to its rank, in lookups and in exchanges; empty under a
            cost model that is not additive.
        peak_mib: memory that planning took, beyond that of the process before.
    """

    solve_s: float
    limit_s: float
    error: str | None = None
    is_infeasible: bool = False
    cost: PlanCost | None = None
    lower_bound_ms: float | None = None
    shards: tuple[Shard, ...] = ()
    shard_ms: tuple[tuple[float, float], ...] = ()
    peak_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A case and its outcome."""

    case: Case
    outcome: Outcome

    @property
    def plan(self) -> ShardingPlan:
        """The plan, without its exchange precision; it has no shards if the case has no plan."""
        return ShardingPlan(self.case.task.topology.world_size, self.outcome.shards)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The plans of a task, measured in the same rounds.

    Args:
        rounds_ms: cost of each sharder's plan in every round.
        costs: the same with the medians of the rounds, as a cost of all ranks.
    """

    rounds_ms: Mapping[str, tuple[float, ...]]
    costs: Mapping[str, PlanCost]


def solve(case: Case, *, limit_s: float) -> tuple[Outcome, dict[str, Any]]:
    """Plan a task; return the outcome and the form of plan.json.

    The cost is that of the planner's cost model, whatever the sharder predicts.

    Raises:
        ShardingError, and whatever a sharder raises.
    """
    before_mib = _peak_mib()
    plan, report = case.planner.plan(case.task)
    peak_mib = _peak_mib() - before_mib
    priced = price(case.planner.cost_model, with_precisions(case.task, plan))
    shards = () if priced is None else shard_costs(plan, priced)
    outcome = Outcome(
        solve_s=report.solve_s,
        limit_s=limit_s,
        cost=report.cost,
        lower_bound_ms=report.lower_bound_ms,
        shards=plan.shards,
        shard_ms=tuple((shard.compute_ms, shard.comm_ms) for shard in shards),
        peak_mib=peak_mib,
    )
    return outcome, plan_json(plan, report)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB


def digest(*parts: Any) -> str:
    """Return a short hash of JSON."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_digest(made: object, options: Mapping[str, Any] | None) -> str:
    """Return a hash of an object's options and of the file of its class, which may change."""
    path = inspect.getsourcefile(type(made))
    source = Path(path).read_text(encoding="utf-8") if path else ""
    return digest(dict(options or {}), source)


def digest_of_prices(model: object, options: Mapping[str, Any] | None) -> str:
    """Return a hash of what a cost model predicts from, as far as that is known."""
    if isinstance(model, LearnedCostModel):
        return prices_digest(model)
    return source_digest(model, options)
