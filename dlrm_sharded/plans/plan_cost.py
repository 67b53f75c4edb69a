"""Measured and predicted costs of plans, which are one type, so that they can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars

from dlrm_sharded.files.json_forms import read_form

DIRECTIONS = ("forward", "backward")

INPUT_DIST = "input_dist"
"""Redistribution of the ids, which precedes the stages and does not count as cost."""

FWD_COMPUTE, FWD_COMM = "fwd_compute", "fwd_comm"
BWD_COMM, BWD_COMPUTE = "bwd_comm", "bwd_compute"

STAGE_LABELS = {
    FWD_COMPUTE: "lookups",
    FWD_COMM: "exchange",
    BWD_COMM: "exchange of gradients",
    BWD_COMPUTE: "update of tables",
}
"""Names of the stages in sentences; the legends of plots have the names of the fields."""

STAGES = tuple(STAGE_LABELS)
"""The embedding stages of a training step, in the order in which they run.

Each is timed from a barrier and predicted by itself. The stages of a direction run one after the
other.
"""

EXCHANGE_STAGES = (FWD_COMM, BWD_COMM)
"""Stages in which ranks exchange data and wait for each other."""

COMPUTE_STAGES = (FWD_COMPUTE, BWD_COMPUTE)
"""Stages in which each rank computes by itself."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Time of the embedding stages of one training step on one rank, in ms; a field for each."""

    fwd_compute_ms: float
    fwd_comm_ms: float
    bwd_comm_ms: float
    bwd_compute_ms: float

    @property
    def total_ms(self) -> float:
        """Sum over the stages."""
        return sum(self.stage_ms(stage) for stage in STAGES)

    @property
    def computation_ms(self) -> float:
        """Sum over `COMPUTE_STAGES`."""
        return sum(self.stage_ms(stage) for stage in COMPUTE_STAGES)

    @property
    def exchange_ms(self) -> float:
        """Sum over `EXCHANGE_STAGES`."""
        return sum(self.stage_ms(stage) for stage in EXCHANGE_STAGES)

    def stage_ms(self, stage: str) -> float:
        """Return the time of one of `STAGES`."""
        return float(getattr(self, f"{stage}_ms"))

    def to_json(self) -> dict[str, float]:
        """Return the form of `per_rank` in plan.json."""
        return {f"{stage}_ms": self.stage_ms(stage) for stage in STAGES}


NO_COST = StageCost(**dict.fromkeys((f"{stage}_ms" for stage in STAGES), 0.0))
"""Cost of a rank that has no shards."""


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Stage costs of all ranks under one plan, in rank order.

    Args:
        input_dist_ms: time of the redistribution of the ids on each rank; None if not known.
        excess_ms: by how much the slowest rank is expected to be slower than the slowest predicted
            one, see `cost.expected_maximum`; 0 for what was measured.
    """

    per_rank: tuple[StageCost, ...]
    input_dist_ms: tuple[float, ...] | None = None
    excess_ms: float = 0.0

    @classmethod
    def from_stages(
        cls, stages_ms: Mapping[str, Sequence[float]], *, input_dist_ms: Sequence[float] | None
    ) -> PlanCost:
        """Build a cost from the times of every stage on all ranks.

        Args:
            stages_ms: [W] for each of `STAGES`, by its name.

        Raises:
            TypeError: a stage is missing, or one is unknown.
        """
        by_rank = zip(*stages_ms.values(), strict=True)
        keys = [f"{stage}_ms" for stage in stages_ms]
        return cls(
            per_rank=tuple(StageCost(**dict(zip(keys, times, strict=True))) for times in by_rank),
            input_dist_ms=None if input_dist_ms is None else tuple(input_dist_ms),
        )

    def __repr__(self) -> str:
        slowest = max(range(len(self.per_rank)), key=lambda rank: self.per_rank[rank].total_ms)
        stages = (f"{stage} {self.per_rank[slowest].stage_ms(stage):.3g}" for stage in STAGES)
        return (
            f"PlanCost: {self.cost_ms:.4g} ms on the slowest of {len(self.per_rank)} ranks, "
            f"{self.imbalance:.2f} times their mean\n"
            f"  rank {slowest}: {', '.join(stages)} ms\n"
            f"  critical path {self.critical_path_ms:.4g} ms"
        )

    def with_stages(self, stages_ms: Mapping[str, Sequence[float]]) -> PlanCost:
        """Return a cost in which some stages take other times, [W] for each of them.

        Its `excess_ms` is 0, because the excess depends on the times of all stages.
        """

        def changed(rank: int, cost: StageCost) -> StageCost:
            times_ms = {f"{stage}_ms": times[rank] for stage, times in stages_ms.items()}
            return dataclasses.replace(cost, **times_ms)

        per_rank = (changed(rank, cost) for rank, cost in enumerate(self.per_rank))
        return dataclasses.replace(self, excess_ms=0.0, per_rank=tuple(per_rank))

    @property
    def cost_ms(self) -> float:
        """Max over ranks of the sum over stages, as in the papers, and the expected excess."""
        return max(rank.total_ms for rank in self.per_rank) + self.excess_ms

    @property
    def critical_path_ms(self) -> float:
        """Sum over stages of the max over ranks, which a synchronous step takes, and the excess."""
        return sum(self.stage_max_ms(stage) for stage in STAGES) + self.excess_ms

    def weighed_ms(self, critical_path_share: float) -> float:
        """Return the weighted mean of the cost and the critical path, which a search minimizes."""
        share = critical_path_share
        return (1.0 - share) * self.cost_ms + share * self.critical_path_ms

    @property
    def imbalance(self) -> float:
        """Max over mean of the ranks' totals; 1 if all ranks cost the same."""
        totals = [rank.total_ms for rank in self.per_rank]
        mean = sum(totals) / len(totals)
        return max(totals) / mean if mean > 0 else 1.0

    @property
    def input_dist_max_ms(self) -> float | None:
        """Redistribution of the ids on the slowest rank; None if not known."""
        return None if self.input_dist_ms is None else max(self.input_dist_ms)

    def stage_max_ms(self, stage: str) -> float:
        """Return the time of a stage on its slowest rank."""
        return max(rank.stage_ms(stage) for rank in self.per_rank)

    def stage_mean_ms(self, stage: str) -> float:
        """Return the mean time of a stage over the ranks."""
        return sum(rank.stage_ms(stage) for rank in self.per_rank) / len(self.per_rank)

    def to_frame(self) -> polars.DataFrame:
        """Return a row for each rank, with the time of each stage and their total, in ms."""
        import polars  # takes longer to load than most plans to make

        return polars.DataFrame(
            [
                {"rank": rank, **cost.to_json(), "total_ms": cost.total_ms}
                for rank, cost in enumerate(self.per_rank)
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the form of `predicted` in plan.json."""
        return {
            "max_ms": self.cost_ms,
            "critical_path_ms": self.critical_path_ms,
            "excess_ms": self.excess_ms,
            "per_rank": [rank.to_json() for rank in self.per_rank],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], *, name: str = "the cost of a plan") -> PlanCost:
        """Read what `to_json` returned.

        Args:
            name: what holds the JSON, for messages.

        Raises:
            DataError: it has another form.
        """
        kept = ("per_rank", "excess_ms")  # plans of earlier versions have no excess
        return read_form({key: fields[key] for key in kept if key in fields}, cls, name=name)
