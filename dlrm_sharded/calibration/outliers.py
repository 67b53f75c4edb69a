"""Finds measured plans that contradict the others, so that no price is fitted to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.workload import Floats

OUTLIER_FACTOR = 5.0
"""A time that is less than this far from what the other plans suggest is no outlier."""

OUTLIER_SPREADS = 6.0
"""Likewise in standard deviations of the other plans, estimated from their median deviation."""

NUM_AGREEING = 3
"""Number of plans that agree with each other and are no outliers: the hardware has changed."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A measured plan that contradicts the others.

    Args:
        index: its place among the plans.
        stage: name of the first stage that contradicts them.
        factor: time of the stage relative to what the others suggest.
    """

    index: int
    stage: str
    factor: float

    @property
    def text(self) -> str:
        """Say how far it is off, such as: bwd_compute 1000 times what the others suggest."""
        return f"{self.stage} {self.factor:.3g} times what the others suggest"


def contradicting_plans(logs: Mapping[str, Mapping[int, Floats]]) -> tuple[Outlier, ...]:
    """Return the plans that are far from the median plan in some stage, where few others are.

    Args:
        logs: logarithms of measured times over those that are fitted to all plans, [N] for the
            ranks of a plan, by stage and by the plan's place.
    """
    found: dict[int, Outlier] = {}
    for stage, by_plan in logs.items():
        # the ratios of one rank may be absurd
        for pick in (np.max, np.min):
            ratios = np.array([pick(of_plan) for of_plan in by_plan.values()])
            for place in np.flatnonzero(_contradicted(ratios)):
                index, factor = list(by_plan)[place], math.exp(ratios[place] - np.median(ratios))
                found.setdefault(index, Outlier(index, stage, factor))
    return tuple(found[index] for index in sorted(found))


def _contradicted(ratios: Floats) -> NDArray[np.bool_]:
    """Return [N], whether a logarithm is far from the median, where few others are."""
    if len(ratios) < NUM_AGREEING:
        return np.zeros(len(ratios), dtype=bool)
    deviations = np.abs(ratios - np.median(ratios))
    # 1.4826 median deviations are one standard deviation of a normal distribution
    spread = 1.4826 * float(np.median(deviations))
    num_near = (np.abs(ratios[:, None] - ratios) < math.log(OUTLIER_FACTOR)).sum(axis=1)
    is_far = deviations > max(math.log(OUTLIER_FACTOR), OUTLIER_SPREADS * spread)
    contradicted: NDArray[np.bool_] = is_far & (num_near < NUM_AGREEING)
    return contradicted
