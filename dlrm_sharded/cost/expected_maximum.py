"""The expected time of the slowest rank, given how far each rank's prediction may be off.

A search balances predicted times. Measured times differ from them independently on each rank, so
some rank is slower than the slowest predicted one. Without this excess, the prediction of a
well-balanced plan would be too low, and the more so the more ranks draw level.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan_cost import PlanCost

SPREADS = 6.0
"""Standard deviations beyond which no rank is expected."""

NUM_POINTS = 512
"""Points of the integral, whose error is far below any prediction's."""


def expected_maximum_ms(computation_ms: Floats, exchange_ms: Floats, error: float) -> float:
    """Return the expected maximum over ranks of computation and exchange.

    Args:
        computation_ms: [W], medians of log-normal times that are independent of each other.
        exchange_ms: [W], assumed to be certain, because all ranks wait for an exchange alike.
        error: standard deviation of the logarithms of computations.
    """
    from scipy.special import ndtr  # takes longer to load than most plans to make

    greatest_ms = float((computation_ms + exchange_ms).max())
    times = greatest_ms * np.exp(error * np.linspace(-SPREADS, SPREADS, NUM_POINTS))
    left_ms = times[:, None] - exchange_ms  # for a rank's computation
    ended = (left_ms >= 0.0) * 1.0  # the probability that a rank has ended
    computes = computation_ms > 0.0
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(left_ms[:, computes], 0.0)) - np.log(computation_ms[computes])
    ended[:, computes] = ndtr(logs / error)
    some_run = 1.0 - ended.prod(axis=1)
    return float(times[0] + (np.diff(times) * (some_run[1:] + some_run[:-1]) / 2).sum())


def with_expected_excess(cost: PlanCost, rank_error: float | None) -> PlanCost:
    """Return a predicted cost with the expected excess of its slowest rank.

    Args:
        rank_error: standard deviation over ranks of the logarithm of measured over predicted
            computation, without what all ranks have in common; None if it is not known.
    """
    computation_ms = np.array([rank.computation_ms for rank in cost.per_rank])
    if not rank_error or not computation_ms.any():
        return cost
    exchange_ms = np.array([rank.exchange_ms for rank in cost.per_rank])
    expected_ms = expected_maximum_ms(computation_ms, exchange_ms, rank_error)
    excess_ms = expected_ms - max(rank.total_ms for rank in cost.per_rank)
    return dataclasses.replace(cost, excess_ms=max(0.0, excess_ms))
