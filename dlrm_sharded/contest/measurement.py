"""Holds the measured costs of the plans of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.runs.paired import PairedRatio, paired_ratio


@dataclass(frozen=True, slots=True)
class Measurement:
    """The plans of a task, measured beside one another.

    Args:
        rounds_ms: cost of each sharder's plan in every round.
        costs: the same with the medians of the rounds, as a cost of all ranks.
    """

    rounds_ms: Mapping[str, tuple[float, ...]]
    costs: Mapping[str, PlanCost]

    def ratios(self, reference: str) -> dict[str, PairedRatio]:
        """Return each plan's cost over that of a sharder's plan, from pairs of a round."""
        return {
            sharder: paired_ratio(rounds, self.rounds_ms[reference])
            for sharder, rounds in self.rounds_ms.items()
        }
