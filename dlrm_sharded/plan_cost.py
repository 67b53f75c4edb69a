"""What a plan costs, measured or predicted: one type, so that a model's error is a subtraction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STAGES = ("fwd_compute", "fwd_comm", "bwd_comm", "bwd_compute")
"""The four embedding stages of a training step, in the order in which they run."""


TOTALS = ("cost", "critical_path")
"""What a search can minimise: `cost_ms`, as the papers do, and `critical_path_ms`, as a synchronous
step pays it. Where both were measured they predict a step equally well (README)."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Time of the four embedding stages of one training step on one rank, in ms."""

    fwd_compute_ms: float
    fwd_comm_ms: float
    bwd_comm_ms: float
    bwd_compute_ms: float

    @property
    def total_ms(self) -> float:
        return self.fwd_compute_ms + self.fwd_comm_ms + self.bwd_comm_ms + self.bwd_compute_ms

    def stage_ms(self, stage: str) -> float:
        """Time of one of `STAGES`."""
        return float(getattr(self, f"{stage}_ms"))

    def to_json(self) -> dict[str, float]:
        return {f"{stage}_ms": self.stage_ms(stage) for stage in STAGES}


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Stage costs of all ranks under one plan, in rank order."""

    per_rank: tuple[StageCost, ...]

    @property
    def cost_ms(self) -> float:
        """Max over ranks of the sum over stages: what the papers report."""
        return max(rank.total_ms for rank in self.per_rank)

    @property
    def critical_path_ms(self) -> float:
        """Sum over stages of the max over ranks: what a synchronous step pays."""
        return sum(self.stage_max_ms(stage) for stage in STAGES)

    def total_ms(self, total: str) -> float:
        """One of `TOTALS`."""
        return self.critical_path_ms if total == "critical_path" else self.cost_ms

    @property
    def imbalance(self) -> float:
        """Max over mean of the ranks' totals; 1 where all ranks cost the same."""
        totals = [rank.total_ms for rank in self.per_rank]
        mean = sum(totals) / len(totals)
        return max(totals) / mean if mean > 0 else 1.0

    def stage_max_ms(self, stage: str) -> float:
        return max(rank.stage_ms(stage) for rank in self.per_rank)

    def stage_mean_ms(self, stage: str) -> float:
        return sum(rank.stage_ms(stage) for rank in self.per_rank) / len(self.per_rank)

    def to_json(self) -> dict[str, Any]:
        return {
            "max_ms": self.cost_ms,
            "critical_path_ms": self.critical_path_ms,
            "per_rank": [rank.to_json() for rank in self.per_rank],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PlanCost:
        return cls(per_rank=tuple(StageCost(**rank) for rank in fields["per_rank"]))
