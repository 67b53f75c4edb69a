"""How far the ranks of a plan are off by themselves, beside what they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dlrm_sharded.fitting.samples import Sample
from dlrm_sharded.plans.plan_cost import PlanCost

LEAST_RANKS = 12
"""Number of ranks below which nothing is said of their errors."""

STANDARD_DEVIATIONS = 1.4826
"""Standard deviation of a normal distribution relative to its median absolute deviation."""


def rank_error(pairs: Iterable[tuple[PlanCost, Sample]]) -> float | None:
    """Return the standard deviation of the logarithms of ranks' computation over predicted ones.

    Only ranks of one plan are compared, so that neither the level of the prices nor a machine that
    is slower for a while counts. It is estimated by the median, which few disturbed ranks move.

    Args:
        pairs: predicted costs of measured plans that the model was not fitted to.

    Returns:
        None if too few ranks of those plans compute.
    """
    deviations: list[float] = []
    num_plans = 0
    for predicted, sample in pairs:
        logs = [
            math.log(measured.computation_ms / expected.computation_ms)
            for expected, measured in zip(predicted.per_rank, sample.cost.per_rank, strict=True)
            if min(expected.computation_ms, measured.computation_ms) > 0
        ]
        if len(logs) > 1:
            deviations += (np.array(logs) - np.mean(logs)).tolist()
            num_plans += 1
    if len(deviations) < LEAST_RANKS:
        return None
    median = STANDARD_DEVIATIONS * float(np.median(np.abs(deviations)))
    # the mean of a plan follows its ranks
    return median * math.sqrt(len(deviations) / (len(deviations) - num_plans))
