"""How far fitted factors may be off, against fits to many made-up measurements."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.fitting.confidence import (
    NOISE,
    PART_SPREAD,
    SHARED_SPREAD,
    Confidence,
)
from dlrm_sharded.fitting.factor_fit import fit_factors
from dlrm_sharded.fitting.from_prior import with_uncertainty
from dlrm_sharded.fitting.uncertainty import covariance_after, information
from tests.unit.cost.hardware import measured_plans

PLANS = measured_plans(40, 0, seed=3)
NUM_PARTS = 4
SPREADS = PART_SPREAD**2 * np.eye(NUM_PARTS) + SHARED_SPREAD**2


def rows_of(rng: np.random.Generator, num_times: int) -> np.ndarray:
    return rng.dirichlet(np.ones(NUM_PARTS), num_times)


@pytest.mark.parametrize("before_share", [1.0, 0.1], ids=["of_the_spreads", "better_known"])
def test_the_covariance_is_that_of_errors_of_fits(before_share: float) -> None:
    """Errors of linear fits with the spreads as their prior, whatever they were before."""
    rng = np.random.default_rng(0)
    rows = rows_of(rng, 20)
    found = information(rows, np.zeros(20), np.ones(20))
    before = before_share * SPREADS
    after = np.linalg.inv(np.linalg.inv(SPREADS) + rows.T @ rows / NOISE**2)
    true = rng.multivariate_normal(np.zeros(NUM_PARTS), before, 20_000)
    measured = true @ rows.T + NOISE * rng.standard_normal((len(true), len(rows)))
    errors = measured @ rows @ after / NOISE**2 - true
    covariance = covariance_after(found, None if before_share == 1.0 else before, Confidence())
    np.testing.assert_allclose(covariance, np.cov(errors.T), atol=0.05 * covariance.max())


def spread_of(model: LearnedCostModel) -> np.ndarray:
    """[2], mean standard deviation of a part beside what all parts have in common."""
    assert model.compute.uncertainty is not None
    num_parts = model.compute.num_parts
    apart = np.eye(num_parts) - 1.0 / num_parts
    covariance = apart @ model.compute.uncertainty @ apart
    return np.sqrt(np.trace(covariance, axis1=1, axis2=2) / num_parts)


def test_more_plans_leave_less_uncertain(model: LearnedCostModel) -> None:
    prior = dataclasses.replace(model, compute=dataclasses.replace(model.compute, uncertainty=None))
    spreads = [spread_of(fit_factors(prior, PLANS[:n]).applied(prior)) for n in (1, 5, 40)]
    assert (spreads[0] < PART_SPREAD).all()
    assert (np.diff(spreads, axis=0) < 0).all()
    again = fit_factors(prior, PLANS[:20]).applied(prior)
    assert (spread_of(fit_factors(again, PLANS[20:]).applied(again)) < spread_of(again)).all()


def test_a_fit_says_how_certain_it_is(model: LearnedCostModel) -> None:
    assert (spread_of(model) < PART_SPREAD).all()
    known = with_uncertainty(model, PLANS[:1])
    assert known is model
