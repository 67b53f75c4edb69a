"""An additive cost model in which a user's function gives the time that each shard adds.

Letters: S shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.communication import STATED
from dlrm_sharded.cost.compute import ComputeModel, CostNet
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.files.errors import check_number
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask

ShardTimes = Callable[[Workload], tuple[Floats, Floats]]
"""Returns the forward and the backward time of every shard, in ms, [S] each."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearCostModel:
    """Predicts computation as the sum of a rank's shard times, and exchanges by their bytes.

    Search, lower bound and diagnosis rely on times that are not negative, and that do not fall
    where a shard gets more columns or rows; `testing.check_cost_model` checks that. Tables need no
    access profile, and none is assumed for them.

    Args:
        lookup_ms: times of shards. A `Workload` has their rows, columns, ids and profiles as
            arrays; `num_ids` and `num_vectors` are what reaches the shard in a step.
        exchange_ms_per_mb: time of a MB that the busiest rank sends to others; None for the
            bandwidths that the topology states, and 1 GB/s where it states none.
        launch_ms: time of a rank in each direction for each fused lookup module on it.

    Raises:
        ConfigError: a time is not a finite number, 0 or more.
    """

    lookup_ms: ShardTimes
    exchange_ms_per_mb: float | None = None
    launch_ms: float = 0.0

    def __post_init__(self) -> None:
        check_number("launch_ms", self.launch_ms)
        if self.exchange_ms_per_mb is not None:
            check_number("exchange_ms_per_mb", self.exchange_ms_per_mb)

    def cost_task(self, task: ShardingTask) -> CostedTask:
        """Return the task, unchanged, with its costs."""
        hosts = Hosts.from_topology(task.topology, measured=())
        if (ms_per_mb := self.exchange_ms_per_mb) is not None:
            hosts = Hosts(hosts.world_size, hosts.ranks_per_host, ms_per_mb, ms_per_mb)
        return CostedTask(
            model=self,
            task=task,
            compute=_lookups(self.lookup_ms, self.launch_ms),
            communication=STATED.with_precision(task.exchange_precision, {}),
            hosts=hosts,
        )

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a valid plan."""
        return self.cost_task(with_precisions(task, plan)).predict(plan)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinearLookups(ComputeModel):
    """Computation of ranks as sums over shards, whose times a function gives in place of nets.

    A shard's vector has its two times, and zeros for crowding and reads, because no unit cost
    depends on what else a rank has or reads.
    """

    shard_ms: ShardTimes

    def vectors(self, workload: Workload) -> Floats:
        """Return [S, V], forward and backward time of each shard, and zeros."""
        times = [np.broadcast_to(ms, workload.rank.shape) for ms in self.shard_ms(workload)]
        return np.column_stack([*times, 0.0 * self.crowding.columns(workload), 0.0 * times[0]])


def _lookups(shard_ms: ShardTimes, launch_ms: float) -> LinearLookups:
    none = np.zeros(0)
    net = CostNet((), (), none.reshape(0, 0), none, none, launch_ms, launch_ms)
    return LinearLookups(none, none, none, none, net, net, shard_ms=shard_ms)
