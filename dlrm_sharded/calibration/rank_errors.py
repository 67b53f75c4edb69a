"""How far the ranks of a plan are off by themselves, beside what they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.plans.plan_cost import PlanCost

LEAST_RANKS = 12
"""Number of ranks below which nothing is said of their errors."""

LEVEL = 0.7
"""Least time of a rank relative to the slowest of its plan. Only ranks that draw level decide which
one will be the slowest, and prices are further off where ranks have little in common."""

STANDARD_DEVIATIONS = 1.4826
"""Standard deviation of a normal distribution relative to its median absolute deviation."""


def rank_error(pairs: Iterable[tuple[PlanCost, Sample]]) -> float | None:
    """Return the standard deviation of the logarithms of ranks' computation over predicted ones.

    Only ranks of one plan are compared, so that neither the level of the prices nor a machine that
    is slower for a while counts, and only those that are about as slow as its slowest. The error is
    estimated by the median, which few disturbed ranks move.

    Args:
        pairs: predicted costs of measured plans that the model was not fitted to.

    Returns:
        None if there are too few such ranks.
    """
    deviations: list[float] = []
    num_plans = 0
    for predicted, sample in pairs:
        slowest_ms = max(rank.computation_ms for rank in predicted.per_rank)
        logs = [
            math.log(measured.computation_ms / expected.computation_ms)
            for expected, measured in zip(predicted.per_rank, sample.cost.per_rank, strict=True)
            if expected.computation_ms >= LEVEL * slowest_ms and measured.computation_ms > 0
        ]
        if len(logs) > 1:
            deviations += (np.array(logs) - np.mean(logs)).tolist()
            num_plans += 1
    if len(deviations) < LEAST_RANKS:
        return None
    median = STANDARD_DEVIATIONS * float(np.median(np.abs(deviations)))
    # the mean of a plan follows its ranks
    return median * math.sqrt(len(deviations) / (len(deviations) - num_plans))
