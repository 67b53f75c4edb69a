"""A cluster that is not there: what decides a step besides the plan, and the step under a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.host_time import HostTime, lookups_prior_ms
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.prediction import DensePart, StepPrediction, predict_step, simulated_steps
from dlrm_sharded.step.schedule import Overlap
from dlrm_sharded.step.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Cluster:
    """Holds what decides a step besides the plan: the task, the ranks' dense part, their overlap.

    Args:
        seed: seed of the variation of times over steps.
        sharing: the cores that the ranks of a host share; None if each has its own.
    """

    task: ShardingTask
    dense: DensePart
    overlap: Overlap
    seed: int
    sharing: CoreSharing | None = None

    @classmethod
    def of_equal_ranks(
        cls,
        task: ShardingTask,
        dense: DenseTimes,
        *,
        priced: PricedTask | None,
        dense_error: float,
        overlap: Overlap,
        seed: int,
        sharing: CoreSharing | None = None,
    ) -> Cluster:
        """Return a cluster whose ranks all have one dense part.

        Args:
            priced: predicts the all-reduce of its gradients; None counts that as 0 ms.
            dense_error: expected relative error of its times.
        """
        all_reduce_ms = 0.0 if priced is None else priced.all_reduce_ms(dense.gradient_bytes)
        part = DensePart((dense,) * task.topology.world_size, all_reduce_ms, dense_error)
        return cls(task, part, overlap, seed, sharing)

    def step(
        self,
        plan: ShardingPlan,
        cost: PlanCost,
        *,
        cost_error: float | None = None,
        lookups_host_ms: float = 0.0,
    ) -> StepPrediction:
        """Return the predicted step under a plan with a predicted or measured cost.

        Args:
            cost_error: expected relative error of the cost; None if it is not known.
            lookups_host_ms: measured host time of the lookups and their exchanges; 0 for a prior.
        """
        return predict_step(
            cost,
            self.dense,
            overlap=self.overlap,
            batch_size=self.task.batch_size,
            cost_error=cost_error,
            seed=self.seed,
            sharing=self.sharing,
            host=self._host(plan, lookups_host_ms),
        )

    def _host(self, plan: ShardingPlan, lookups_ms: float) -> HostTime | None:
        """Return the time that hosts of GPUs need for a step under a plan."""
        if self.task.topology.compute_device == "cpu":
            return None
        dense_ms = max(times.launch_ms for times in self.dense.by_rank)
        measured = frozenset({"dense"} if self.dense.error == 0 else ())
        if lookups_ms:
            return HostTime(dense_ms, lookups_ms, measured | {"lookups"})
        num_lookups = int(workload_of_plan(plan, self.task).num_lookups().max())
        return HostTime(dense_ms, lookups_prior_ms(num_lookups), measured)

    def device_ms(self, cost: PlanCost) -> float:
        """Return the mean step under a plan of this cost, on devices that wait for no host."""
        return self.timeline(cost).step_ms

    def timeline(self, cost: PlanCost) -> Timeline:
        """Return the steps whose mean is `step`, as far as devices do not wait for their hosts."""
        return simulated_steps(
            cost, self.dense, overlap=self.overlap, seed=self.seed, sharing=self.sharing
        )

    def shared(self, cost: PlanCost) -> PlanCost:
        """Return the stages of ranks that share cores, when all ranks begin each stage at once."""
        if self.sharing is None:
            return cost
        begins_ms = np.zeros(len(cost.per_rank))
        shared_ms = {}
        for stage in COMPUTE_STAGES:
            times_ms = np.array([rank.stage_ms(stage) for rank in cost.per_rank])
            shared_ms[stage] = self.sharing.ends_ms(begins_ms, times_ms).tolist()
        return cost.with_stages(shared_ms)
