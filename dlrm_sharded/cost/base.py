"""The protocols of cost models, for planning, searching and reporting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask, Topology

if TYPE_CHECKING:
    from dlrm_sharded.cost.communication import CommunicationModel, Hosts
    from dlrm_sharded.cost.compute import ComputeModel
    from dlrm_sharded.cost.features import Workload


class CostModel(Protocol):
    """Predicts the cost that `calibration.measure` would measure.

    A cost model may have a method `caveat(topology)`, see `caveat_of`, a `standing`, see
    `standing_of`, and a method `for_precision(precision)`, see `for_precision`.
    """

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict the stages of every rank under a valid plan, and the redistribution of ids.

        `input_dist_ms` of the result is None if the model does not predict it.
        """


@runtime_checkable
class AdditiveCostModel(CostModel, Protocol):
    """A cost model under which every shard adds a vector to its rank, regardless of other shards.

    The search, the lower bound and the diagnosis of plans need this: they price each possible shard
    once, and a plan by sums.

    An additive model may have a method `for_task(task)`, see `for_task`.
    """

    @property
    def compute(self) -> ComputeModel:
        """Prices of lookups: the vector of each shard, and the times of sums of vectors."""

    @property
    def communication(self) -> CommunicationModel:
        """Prices of exchanges between ranks."""

    def __hash__(self) -> int:
        """Models are compared by identity, so that results under them can be cached."""

    def hosts(self, topology: Topology) -> Hosts:
        """Return the topology as `communication` sees it."""

    def predict_workload(self, workload: Workload, hosts: Hosts) -> PlanCost:
        """Predict the cost of the shards of a workload, without warnings."""


def caveat_of(model: CostModel, topology: Topology) -> str | None:
    """Return why a model's predictions say little about these ranks; None if nothing is known.

    Reports repeat the sentence, and have no lower bound, as that is one of the predictions.
    """
    caveat = getattr(model, "caveat", None)
    return None if caveat is None else caveat(topology)


def standing_of(model: CostModel) -> Standing | None:
    """Return what a model says of the origin of its prices; None if it says nothing."""
    return getattr(model, "standing", None)


def for_task(model: AdditiveCostModel, task: ShardingTask) -> AdditiveCostModel:
    """Return the model whose prices are right for a task: most models are so for all tasks.

    Call it where a task and a model come in, before reading `communication`. The same model and
    task give the same object.
    """
    of_task = getattr(model, "for_task", None)
    return model if of_task is None else of_task(task)


M = TypeVar("M", bound="CostModel | None")


def for_precision(model: M, precision: ExchangePrecision) -> M:
    """Return the model whose exchanges have a precision.

    A model without such prices has the same ones for all precisions. The same model and precision
    give the same object.
    """
    of_precision = getattr(model, "for_precision", None)
    return model if of_precision is None else of_precision(precision)
