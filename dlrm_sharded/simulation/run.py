"""The steps of a cluster under one plan, rank by rank, from measured or priced computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.ranks import MEASURED, ORIGINS, PRICED, RankTimes, with_times
from dlrm_sharded.step.breakdown import Wait
from dlrm_sharded.step.prediction import StepPrediction
from dlrm_sharded.step.timeline import Timeline
from dlrm_sharded.training.memory import RankMemory, Workload, estimate_memory


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The steps of a cluster under one plan.

    Args:
        ranks: computation of every rank, and how it is known.
        cost: stages of every rank; exchanges are predicted.
        memory: of every rank, without what its process takes before anything is built.
    """

    planned: Planned
    task: ShardingTask
    ranks: tuple[RankTimes, ...]
    cost: PlanCost
    step: StepPrediction
    timeline: Timeline
    memory: tuple[RankMemory, ...]

    @property
    def origins(self) -> dict[str, int]:
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

    @property
    def table_bytes(self) -> list[int]:
        """Memory of every rank for its tables."""
        return self.planned.plan.bytes_by_rank(self.task.topology)

    @property
    def memory_bytes(self) -> list[int]:
        """Memory of every rank for everything."""
        return [memory.total for memory in self.memory]

    def longest_wait(self, rank: int) -> Wait | None:
        """Return the exchange that a rank waits for longest; None if it waits for none."""
        waits = [wait for wait in self.step.breakdown.waits if wait.waiting_ms[rank] > 0]
        return max(waits, key=lambda wait: float(wait.waiting_ms[rank]), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the form of a sharder in simulation.json."""
        return {
            "sharder": self.planned.sharder,
            "step_ms": self.step.step_ms,
            "samples_per_s": self.step.samples_per_s,
            "device_ms": self.step.device_ms,
            "host_ms": self.step.host_ms,
            "host_source": self.step.host and self.step.host.source,
            "error": self.step.error,
            "parts_ms": self.step.breakdown.mean_parts_ms,
            "hidden_ms": self.step.breakdown.mean_hidden_ms,
            "embedding_cost_ms": self.cost.cost_ms,
            "predicted_embedding_cost_ms": self.planned.cost.cost_ms,
            "critical_path_ms": self.cost.critical_path_ms,
            "imbalance": self.cost.imbalance,
            "num_shards": len(self.planned.plan.shards),
            "ranks": self.origins,
            "num_folded_ranks": self.num_folded,
            "core_wait_share": self.core_wait_share,
            "table_bytes": _extremes(self.table_bytes),
            "memory_bytes": _extremes(self.memory_bytes),
            "waits": [
                {
                    "operation": wait.operation,
                    "cause": wait.cause,
                    "mean_waiting_ms": float(wait.waiting_ms.mean()),
                    "caused_ms": wait.caused_ms,
                }
                for wait in self.step.breakdown.waits
            ],
            "per_rank": [stages.to_json() for stages in self.cost.per_rank],
        }


def simulate(
    planned: Planned, ranks: Sequence[RankTimes], cluster: Cluster, workload: Workload
) -> SimulatedRun:
    """Simulate the steps under a plan whose ranks compute as long as `ranks` says.

    Args:
        workload: what a run needs memory for, besides its tables.
    """
    cost, cost_error = planned.cost, planned.cost_error
    if ranks[0].origin != PRICED:  # a prediction contains what caches add, and has an error
        cached = planned.report.cached
        cost = with_times(cost, ranks, None if cached is None else cached.added_ms_by_rank)
        cost_error = None
    return SimulatedRun(
        planned,
        cluster.task,
        tuple(ranks),
        cluster.shared(cost),
        cluster.step(
            planned.plan,
            cost,
            cost_error=cost_error,
            lookups_host_ms=max(times.host_ms for times in ranks),
        ),
        cluster.timeline(cost),
        estimate_memory(planned.plan, cluster.task, workload, [0] * len(ranks)),
    )


def _extremes(num_bytes: Sequence[int]) -> Mapping[str, int]:
    return {"max": max(num_bytes), "min": min(num_bytes)}
