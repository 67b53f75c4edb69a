"""The protocols of cost models, and a task with its costs, on which plans are searched for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard, runtime_checkable

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.communication import CommunicationModel
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.files.errors import ConfigError, UserError, shortened
from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import (
    BWD_COMM,
    BWD_COMPUTE,
    FWD_COMM,
    FWD_COMPUTE,
    INPUT_DIST,
    PlanCost,
)
from dlrm_sharded.plans.task import ShardingTask, Topology


class CostModel(Protocol):
    """Predicts the cost that `measuring.measure` would measure.

    A cost model may have a `provenance` and a method `caveat(topology)`, see `provenance_of` and
    `caveat_of`; an `AdditiveCostModel` puts both into each `CostedTask`.

    The tables of its tasks have an access profile, measured or assumed; an additive model assumes
    the profiles that it needs itself.
    """

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict the stages of every rank under a valid plan, and the redistribution of ids.

        Exchanges have the precision of the plan, if the model knows precisions.
        `input_dist_ms` of the result is None if the model does not predict it.
        """


@runtime_checkable
class AdditiveCostModel(CostModel, Protocol):
    """A cost model under which every shard adds a vector to its rank, regardless of other shards.

    The search, the lower bound and the diagnosis of plans need this: they compute the cost of each
    possible shard once, and of a plan by sums. They read the costs of a `CostedTask`.
    """

    def __hash__(self) -> int:
        """Return a hash, by which the bound of equal costed tasks is cached."""

    def cost_task(self, task: ShardingTask) -> CostedTask:
        """Return the task with the costs of its lookups, and of exchanges in its precision.

        The task of the result is the given one, with an access profile for every table if the
        model reads profiles.
        """


@dataclass(frozen=True, slots=True)
class CostedTask:
    """A task with the costs of an additive cost model, which makes it (`cost_task`).

    Args:
        model: the cost model that made this.
        task: its tables all have an access profile, if the model reads profiles.
        communication: costs of exchanges between the ranks of this task.
        hosts: the ranks as `communication` sees them.
        provenance: origin of the costs and their expected error; None if nothing is known.
        caveat: why the costs say little about these ranks; None if nothing is known. Reports
            repeat the sentence, and show no lower bound, because that is a prediction, too.
    """

    model: AdditiveCostModel
    task: ShardingTask
    compute: ComputeModel = field(compare=False)
    communication: CommunicationModel = field(compare=False)
    hosts: Hosts = field(compare=False)
    provenance: CostProvenance | None = field(default=None, compare=False)
    caveat: str | None = field(default=None, compare=False)

    def with_task(self, task: ShardingTask) -> CostedTask:
        """Return a changed task with its own costs."""
        return self if task == self.task else self.model.cost_task(task)

    def predict(self, plan: ShardingPlan) -> PlanCost:
        """Predict a valid plan, without warnings, with exchanges in the task's precision."""
        return self.predict_workload(workload_of_plan(plan, self.task))

    def predict_workload(self, workload: Workload) -> PlanCost:
        """Predict the cost of the shards of a workload on the ranks of the task."""
        return workload_cost(workload, self.compute, self.communication, self.hosts)


WithCosts = Callable[[ShardingTask], CostedTask]
"""Gives a task its costs."""


def workload_cost(
    workload: Workload, compute: ComputeModel, communication: CommunicationModel, hosts: Hosts
) -> PlanCost:
    """Return the predicted cost of the shards of a workload, on any hosts."""
    sums = workload.by_rank(compute.vectors(workload))
    forward, backward = compute.times_ms(sums, workload.num_lookups()).T

    def exchange_ms(kind: str) -> list[float]:
        exchange = communication.exchange_of(kind, workload)
        return communication.exchange_ms(kind, exchange, hosts).tolist()

    return PlanCost.from_stages(
        {
            FWD_COMPUTE: forward.tolist(),
            FWD_COMM: exchange_ms(FWD_COMM),
            BWD_COMM: exchange_ms(BWD_COMM),
            BWD_COMPUTE: backward.tolist(),
        },
        input_dist_ms=exchange_ms(INPUT_DIST),
    )


def is_additive(model: object) -> TypeGuard[AdditiveCostModel]:
    """Return whether a model is additive, as search, lower bound and diagnosis require."""
    return isinstance(model, AdditiveCostModel)


def cost_task(model: CostModel | None, task: ShardingTask) -> CostedTask | None:
    """Return the task with the costs of a model; None if the model is not additive.

    The planner, the sharder and the report of a plan get the same value.
    """
    return cost_additive(model, task) if is_additive(model) else None


@functools.lru_cache(maxsize=8)
def cost_additive(model: AdditiveCostModel, task: ShardingTask) -> CostedTask:
    """Return what `cost_task` returns for a model that is additive."""
    return model.cost_task(task)


def with_assumed_profiles(model: CostModel | None, task: ShardingTask) -> ShardingTask:
    """Return the task with the access profiles that a model assumes, or the usual ones."""
    costed = cost_task(model, task)
    return with_profiles(task) if costed is None else costed.task


def predict_plan(model: CostModel, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
    """Predict a plan by any model, a user's included, and check the result.

    Raises:
        ConfigError: the model fails, or does not return finite times of all ranks.
    """
    name, world_size = type(model).__name__, task.topology.world_size
    try:
        cost = model.predict(plan, task)
    except UserError:
        raise
    except Exception as error:  # whatever a model of a user may raise
        raise ConfigError(
            f"the cost model {name} failed on a plan of {len(task.tables)} tables on {world_size} "
            f"ranks: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(cost, PlanCost):
        raise ConfigError(
            f"the cost model {name} returned {shortened(cost)}, which is not a PlanCost"
        )
    if len(cost.per_rank) != world_size:
        raise ConfigError(
            f"the cost model {name} predicted the costs of {len(cost.per_rank)} ranks, not "
            f"of {world_size}"
        )
    for rank, stages in enumerate(cost.per_rank):
        if not 0.0 <= stages.total_ms < math.inf:
            raise ConfigError(
                f"the cost model {name} predicts {stages.total_ms:g} ms for rank {rank}; a time "
                "must be a finite number, 0 or more; use another cost_model"
            )
    return cost


def caveat_of(model: CostModel | None, topology: Topology) -> str | None:
    """Return why a model's predictions say little about these ranks; None if nothing is known."""
    return caveat(topology) if (caveat := getattr(model, "caveat", None)) else None


def costs_name(model: CostModel) -> str:
    """Return how reports name the costs of a model: as its `costs_name`, or as its class."""
    return str(getattr(model, "costs_name", type(model).__name__))


def provenance_of(model: CostModel | None) -> CostProvenance | None:
    """Return what a model says about the origin of its costs; None if it says nothing."""
    return getattr(model, "provenance", None)
