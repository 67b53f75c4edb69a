"""Simulates the steps of a cluster under a plan, from the times of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.simulation.ranks import (
    MEASURED,
    ORIGINS,
    PRICED,
    RankTimes,
    with_times,
)
from dlrm_sharded.step.breakdown import Breakdown, Wait, breakdown
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.prediction import DensePart, predict_step, simulated_steps
from dlrm_sharded.step.schedule import Overlap
from dlrm_sharded.step.timeline import Timeline
from dlrm_sharded.training.memory import RankMemory, Workload, estimate_memory


@dataclass(frozen=True, slots=True)
class Cluster:
    """The properties that all plans of a simulation share.

    Args:
        workload: what a run needs memory for, besides its tables.
        sharing: the cores that the ranks of a host share; None if each has its own.
    """

    task: ShardingTask
    dense: DensePart
    overlap: Overlap
    workload: Workload
    seed: int
    sharing: CoreSharing | None = None

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


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The steps of a cluster under one plan.

    Args:
        sharder: name of the plan's sharder, with its settings.
        ranks: computation of every rank, and how it is known.
        cost: stages of every rank; exchanges are predicted.
        predicted: predicted stages of every rank.
        memory: of every rank, without what its process takes before anything is built.
        error: expected relative error of the step; None if it is not known.
    """

    sharder: str
    plan: ShardingPlan
    task: ShardingTask
    ranks: tuple[RankTimes, ...]
    cost: PlanCost
    predicted: PlanCost
    timeline: Timeline
    breakdown: Breakdown
    memory: tuple[RankMemory, ...]
    error: float | None = None

    @property
    def step_ms(self) -> float:
        """Mean time of a step."""
        return self.breakdown.step_ms

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return 1e3 * self.task.batch_size / self.step_ms

    @property
    def origins(self) -> Mapping[str, int]:
        """Number of ranks by how their computation is known, one of `ranks.ORIGINS`."""
        counts = Counter(times.origin for times in self.ranks)
        return {origin: counts[origin] for origin in ORIGINS if counts[origin]}

    @property
    def num_folded(self) -> int:
        """Number of ranks with a shard that had fewer rows in the measurement."""
        return sum(times.num_folded > 0 for times in self.ranks)

    @property
    def core_wait_share(self) -> float:
        """Share of the time of the measurements in which other processes had the core."""
        measured = [times for times in self.ranks if times.origin == MEASURED]
        seconds = sum(times.seconds for times in measured)
        return sum(times.core_wait_s for times in measured) / seconds if seconds else 0.0

    def longest_wait(self, rank: int) -> Wait | None:
        """Return the exchange that a rank waits for longest; None if it waits for none."""
        waits = [wait for wait in self.breakdown.waits if wait.waiting_ms[rank] > 0]
        return max(waits, key=lambda wait: float(wait.waiting_ms[rank]), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the form of a sharder in simulation.json."""
        table_bytes = self.plan.bytes_by_rank(self.task.topology)
        return {
            "sharder": self.sharder,
            "step_ms": self.step_ms,
            "samples_per_s": self.samples_per_s,
            "error": self.error,
            "parts_ms": self.breakdown.mean_parts_ms,
            "embedding_cost_ms": self.cost.cost_ms,
            "predicted_embedding_cost_ms": self.predicted.cost_ms,
            "critical_path_ms": self.cost.critical_path_ms,
            "imbalance": self.cost.imbalance,
            "num_shards": len(self.plan.shards),
            "ranks": dict(self.origins),
            "num_folded_ranks": self.num_folded,
            "core_wait_share": self.core_wait_share,
            "table_bytes": {"max": max(table_bytes), "min": min(table_bytes)},
            "memory_bytes": {
                "max": max(memory.total for memory in self.memory),
                "min": min(memory.total for memory in self.memory),
            },
            "waits": [
                {
                    "operation": wait.operation,
                    "cause": wait.cause,
                    "mean_waiting_ms": float(wait.waiting_ms.mean()),
                    "caused_ms": wait.caused_ms,
                }
                for wait in self.breakdown.waits
            ],
            "per_rank": [stages.to_json() for stages in self.cost.per_rank],
        }


def simulate(
    sharder: str,
    plan: ShardingPlan,
    report: PlanReport,
    ranks: Sequence[RankTimes],
    cluster: Cluster,
    *,
    cost_error: float | None = None,
) -> SimulatedRun:
    """Simulate the steps under a plan whose ranks compute as long as `ranks` says.

    Args:
        report: has the predicted cost of the plan.
        cost_error: expected relative error of the cost; None if it is not known.
    """
    assert report.cost is not None
    added_ms = None if report.cached is None else report.cached.added_ms_by_rank
    is_priced = ranks[0].origin == PRICED  # the prediction contains what caches add
    cost = with_times(report.cost, ranks, None if is_priced else added_ms)
    timeline = simulated_steps(
        cost, cluster.dense, overlap=cluster.overlap, seed=cluster.seed, sharing=cluster.sharing
    )
    predicted = predict_step(
        cost,
        cluster.dense,
        overlap=cluster.overlap,
        batch_size=cluster.task.batch_size,
        cost_error=cost_error,
        seed=cluster.seed,
        sharing=cluster.sharing,
    )
    return SimulatedRun(
        sharder=sharder,
        plan=plan,
        task=cluster.task,
        ranks=tuple(ranks),
        cost=cluster.shared(cost),
        predicted=report.cost,
        timeline=timeline,
        breakdown=breakdown(timeline),
        memory=estimate_memory(plan, cluster.task, cluster.workload, [0] * plan.world_size),
        error=predicted.error,
    )
