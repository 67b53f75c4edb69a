"""Report on a plan: its sharder, its predicted cost, and the distance from the lower bound.

A plan contains only the places of shards; everything else a planner knows is in a `PlanReport`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.tables import Table


@dataclass(frozen=True, slots=True)
class ShardCost:
    """Time that one shard adds to its rank: its lookups, and its part in the exchanges."""

    shard: Shard
    table: Table
    compute_ms: float
    comm_ms: float

    @property
    def cost_ms(self) -> float:
        return self.compute_ms + self.comm_ms


@dataclass(frozen=True, slots=True)
class RankCost:
    """A rank and its shards, the costliest first."""

    rank: int
    cost_ms: float
    shards: tuple[ShardCost, ...]

    @property
    def overhead_ms(self) -> float:
        """Time that belongs to no shard: kernel launches, and the exchanges of other ranks."""
        return self.cost_ms - sum(shard.cost_ms for shard in self.shards)


@dataclass(frozen=True, slots=True)
class SplitGain:
    """The gain of splitting a table.

    Args:
        gain_ms: added cost of the plan with the table whole, on the rank where that costs least;
            None where the whole table fits no rank beside the others.
    """

    table: str
    num_shards: int
    by_rows: bool
    gain_ms: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best that a short search without constraints finds under a change of the task.

    Args:
        cost_ms: predicted cost; None if the search found nothing better than the plan.
    """

    change: str
    cost_ms: float | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Explanation of the cost of a plan under a cost model.

    Args:
        bounding: the costliest ranks, at most 8 of the `num_bounding` within 1 % of the costliest.
        splits: gains of split tables, the largest first; fewer than `num_split` on large plans.
        alternatives: None if they were not requested.
    """

    world_size: int
    cost_ms: float
    bounding: tuple[RankCost, ...]
    num_bounding: int
    splits: tuple[SplitGain, ...]
    num_split: int
    alternatives: tuple[Alternative, ...] | None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Origin and predicted cost of a plan.

    Args:
        sharder: name of the sharder that made the plan.
        solve_s: time that the sharder took, in s.
        cost: predicted cost; None without a cost model.
        lower_bound_ms: no valid plan has a predicted `cost_ms` below it; None where not known.
        diagnosis: None where the cost model cannot explain its predictions.
    """

    sharder: str
    solve_s: float
    cost: PlanCost | None = None
    lower_bound_ms: float | None = None
    diagnosis: Diagnosis | None = None

    @property
    def gap(self) -> float | None:
        """Distance of the predicted cost from the lower bound, relative to the bound."""
        if self.cost is None or not self.lower_bound_ms:
            return None
        return self.cost.cost_ms / self.lower_bound_ms - 1.0


def plan_json(plan: ShardingPlan, report: PlanReport) -> dict[str, Any]:
    """Return the form of plan.json."""
    return {
        "sharder": report.sharder,
        **plan.to_json(),
        "solve_s": report.solve_s,
        "lower_bound_ms": report.lower_bound_ms,
        "gap": report.gap,
        "predicted": None if report.cost is None else report.cost.to_json(),
    }
