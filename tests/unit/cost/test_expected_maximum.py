"""The slowest rank is expected to exceed the slowest predicted one, by what ranks are off."""

import math

import numpy as np
import pytest

from dlrm_sharded.cost.expected_maximum import expected_maximum_ms, with_expected_excess
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost

OF_TWO, OF_FOUR = 1 / math.sqrt(math.pi), 1.02938
"""Expected maxima of two and four standard normal numbers."""

SMALL = 0.01
"""Error for which a log-normal number is nearly a normal one."""


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 0.0), (2, OF_TWO), (4, OF_FOUR)])
def test_equal_times(num_ranks, expected):
    computation, exchange = np.full(num_ranks, 50.0), np.full(num_ranks, 7.0)
    found = expected_maximum_ms(computation, exchange, SMALL)
    assert found == pytest.approx(57.0 + 50.0 * SMALL * expected, abs=0.01)


def cost(*computations: float) -> PlanCost:
    """Ranks that compute for so long, half of it forward, and exchange for 4 ms."""
    return PlanCost(tuple(StageCost(ms / 2, 1.0, 3.0, ms / 2) for ms in computations))


@pytest.mark.parametrize("computations", [(60.0,) * 8, (60.0, 58.0, 40.0, 10.0), (60.0, 0.0)])
@pytest.mark.parametrize("error", [0.05, 0.2])
def test_predictions_are_unbiased_however_well_ranks_are_balanced(computations, error):
    """A plan that a search has balanced, and those that it has not chosen."""
    predicted = with_expected_excess(cost(*computations), error)
    off = np.random.default_rng(0).lognormal(0.0, error, (4000, len(computations)))
    measured = (off * computations + 4.0).max(axis=1).mean()
    assert predicted.cost_ms / measured == pytest.approx(1.0, abs=0.03)
    assert predicted.critical_path_ms - predicted.cost_ms == pytest.approx(0.0, abs=1e-9)


def test_without_an_error_nothing_changes():
    plain = cost(60.0, 60.0)
    assert with_expected_excess(plain, None) == plain
    assert with_expected_excess(plain, 0.1).excess_ms > 0
    measured_again = with_expected_excess(plain, 0.1).with_stages({"fwd_compute": [1.0, 1.0]})
    assert measured_again.excess_ms == 0.0
