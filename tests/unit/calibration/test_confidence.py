"""How far prices may be moved, and what a disturbed measurement weighs."""

import math

import pytest

from dlrm_sharded.calibration.confidence import (
    PART_SPREAD,
    SHARED_SPREAD,
    Confidence,
    Disturbance,
    reliability,
)
from dlrm_sharded.plans.standing import Standing


@pytest.mark.parametrize("standing", [None, Standing("prior", "x", error=0.05)])
def test_a_prior_may_be_wrong_by_a_factor(standing: Standing | None) -> None:
    assert Confidence.of_standing(standing) == Confidence(SHARED_SPREAD, PART_SPREAD, 0.3)


def test_calibrated_prices_are_as_sure_as_their_errors() -> None:
    found = Confidence.of_standing(Standing("calibrated", "x", error=0.06, rank_error=0.1))
    assert found.shared_spread == pytest.approx(0.073, abs=0.001)
    assert found.part_spread == 0.1
    assert found.error == 0.06
    without = Confidence.of_standing(Standing("calibrated", "x", error=0.06))
    assert without.part_spread == without.shared_spread
    unsure = Confidence.of_standing(Standing("calibrated", "x", error=50.0, rank_error=2.0))
    assert (unsure.shared_spread, unsure.part_spread) == (SHARED_SPREAD, PART_SPREAD)
    assert Confidence.of_standing(Standing("calibrated", "x")) == Confidence()


def test_measured_prices_keep_the_spreads_of_their_prior() -> None:
    """As what was measured is fitted again, together with the runs."""
    found = Confidence.of_standing(Standing("measured", "x", error=0.12))
    assert found == Confidence(error=0.12)


def test_other_work_adds_noise() -> None:
    assert Disturbance().noise == 0.0
    assert reliability(0.0) == 1.0
    half = Disturbance(core_wait=0.5)
    assert half.noise == pytest.approx(math.log(2))
    assert reliability(half.noise) < 0.03
    assert Disturbance(change=2.0).noise == pytest.approx(half.noise)
    assert Disturbance(core_wait=1.5, change=0.5).noise < 4.0, "whatever stands in a line"
    both = Disturbance(0.5, 2.0)
    assert both.noise == pytest.approx(math.sqrt(2) * math.log(2))
