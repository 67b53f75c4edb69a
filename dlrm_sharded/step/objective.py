"""The step as the objective of a search: computation, and what of the exchanges is not hidden.

Every plan of a task has the same dense part, so what tells plans apart in a step is the computation
of the slowest rank and the part of each exchange beside which no rank computes. Both follow from
simulated steps near one plan, so that they are right for every pipeline and every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.plans.plan_cost import (
    BWD_COMPUTE,
    EXCHANGE_STAGES,
    FWD_COMPUTE,
    STAGES,
    PlanCost,
)

HIDDEN_WEIGHT = 0.01
"""Weight of hidden exchanges in the objective: of plans with equal steps, the cheaper one wins."""

ROUNDING = 0.1
"""Width of the corner of the smooth objective, where an exchange is just hidden, relative to the
time that is hidden."""


@dataclass(frozen=True, slots=True)
class StepObjective:
    """The part of a step that plans decide, which a search minimizes in place of the cost.

    It is the computation of the slowest rank plus the exposed part of all exchanges, which are
    taken as equally long, as the vectors of a step and their gradients are.

    Args:
        hidden_ms: time of each exchange of a step that computation can hide.
        joins_computation: whether a rank goes on from the backward computation of a step to the
            forward computation of the next one without meeting others, so that the maximum over
            ranks is that of their sum; else each of the two has its own maximum.
    """

    hidden_ms: tuple[float, ...]
    joins_computation: bool

    @classmethod
    def near(cls, cost: PlanCost, step_ms: Callable[[PlanCost], float]) -> StepObjective:
        """Return the objective for plans that cost about as much as one of them.

        Args:
            step_ms: returns the simulated step of devices under a plan of this cost.
        """
        num_ranks = len(cost.per_rank)

        def step_with(changed_ms: Mapping[str, float]) -> float:
            even = {stage: [cost.stage_mean_ms(stage)] * num_ranks for stage in STAGES}
            for stage, ms in changed_ms.items():
                even[stage] = [ms] * num_ranks
            return step_ms(cost.with_stages(even))

        long_ms = 2.0 * step_with({})  # longer than whatever runs beside an exchange
        exposed = [
            step_with({stage: long_ms}) - step_with({stage: 0.0}) for stage in EXCHANGE_STAGES
        ]
        # Times are sums over steps, whose rounding is no time that anything hides.
        hidden = tuple(max(0.0, round(long_ms - ms, 6)) for ms in exposed)
        return cls(hidden, num_ranks > 1 and _joins(cost, step_ms))

    @property
    def all_hidden_ms(self) -> float:
        """Time that is hidden of all exchanges together, if each is long enough."""
        return sum(self.hidden_ms)

    def exposed_ms(self, exchange_ms: float) -> float:
        """Return the value of exchanges that take so long together."""
        each_ms = exchange_ms / len(self.hidden_ms)
        exposed_ms = sum(max(0.0, each_ms - hidden) for hidden in self.hidden_ms)
        return (1.0 - HIDDEN_WEIGHT) * exposed_ms + HIDDEN_WEIGHT * exchange_ms

    def smooth_exposed_ms(self, exchange_ms: float) -> tuple[float, float]:
        """Return `exposed_ms` with round corners, and its slope, which is never 0."""
        beyond = exchange_ms / len(self.hidden_ms) - np.array(self.hidden_ms)
        # The hyperbola around a corner, whose asymptotes are 0 and the line.
        widths = ROUNDING * np.array(self.hidden_ms)
        distances = np.maximum(np.hypot(beyond, widths), 1e-12)
        value_ms = float((beyond + distances).sum()) / 2
        slope = float((1.0 + beyond / distances).mean()) / 2
        return (
            (1.0 - HIDDEN_WEIGHT) * value_ms + HIDDEN_WEIGHT * exchange_ms,
            (1.0 - HIDDEN_WEIGHT) * slope + HIDDEN_WEIGHT,
        )


def _joins(cost: PlanCost, step_ms: Callable[[PlanCost], float]) -> bool:
    """Return whether one rank's longer forward and another's longer backward pass overlap."""
    num_ranks = len(cost.per_rank)
    even_ms = {stage: [cost.stage_mean_ms(stage)] * num_ranks for stage in STAGES}
    more_ms = step_ms(cost.with_stages(even_ms))
    uneven_ms = {stage: list(times) for stage, times in even_ms.items()}
    uneven_ms[FWD_COMPUTE][0] += more_ms
    uneven_ms[BWD_COMPUTE][1] += more_ms
    return step_ms(cost.with_stages(uneven_ms)) - more_ms < 1.5 * more_ms
