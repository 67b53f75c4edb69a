"""Ratios of pairs, with an interval that holds whatever their distribution."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_sharded.runs.paired import MAX_EXACT, PairedRatio, least_pairs, paired_ratio

TRUE = 1.05
Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
DRAWS: dict[str, Draw] = {
    "normal": lambda rng, num: rng.normal(size=num),
    "heavy_tails": lambda rng, num: rng.standard_t(2, size=num),
    "uniform": lambda rng, num: rng.uniform(-1, 1, size=num),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("num", [6, 15, MAX_EXACT + 5])
def test_the_interval_has_the_true_ratio_in_19_of_20_cases(draw: Draw, num: int) -> None:
    rng, num_cases = np.random.default_rng(0), 1500
    found = [
        paired_ratio(TRUE * np.exp(0.03 * draw(rng, num)), np.ones(num)) for _ in range(num_cases)
    ]
    share = sum(case.low <= TRUE <= case.high for case in found) / num_cases
    assert 0.935 <= share <= 0.985


def test_what_disturbs_both_of_a_pair_does_not_count() -> None:
    rng = np.random.default_rng(1)
    disturbed, noise = rng.uniform(1.0, 5.0, 12), rng.normal(0.0, 0.01, 12)
    found = paired_ratio(TRUE * disturbed * np.exp(noise), disturbed)
    assert found.ratio == pytest.approx(TRUE, abs=0.01)
    assert 1.0 < found.low < found.high < 1.1
    assert not found.is_tie


def test_the_order_of_the_two_turns_the_ratio_round() -> None:
    first, second = np.exp(np.random.default_rng(2).normal(size=(2, 9)))
    one, other = paired_ratio(first, second), paired_ratio(second, first)
    assert (one.ratio, one.low, one.high) == pytest.approx(
        (1 / other.ratio, 1 / other.high, 1 / other.low)
    )


def test_five_pairs_tell_nothing_with_this_confidence() -> None:
    found = paired_ratio([2.0] * 5, [1.0] * 5)
    assert found == PairedRatio(2.0, 0.0, math.inf, 5)
    assert found.is_tie
    assert found.pairs_to_tell(0.02) == least_pairs(0.95) == 6


def test_one_wild_pair_does_not_decide() -> None:
    found = paired_ratio([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 100.0], [1.0] * 8)
    assert found.ratio == pytest.approx(1.0, abs=0.02)
    assert found.is_tie


@pytest.mark.parametrize(("difference", "pairs"), [(0.041, 10), (0.02, 40), (0.5, 6)])
def test_pairs_that_would_tell_a_difference(difference: float, pairs: int) -> None:
    assert PairedRatio(1.0, 1 / 1.04, 1.04, 10).pairs_to_tell(difference) == pairs


@pytest.mark.parametrize("figures", [[], [0.0], [-1.0], [math.nan], [math.inf]], ids=str)
def test_figures_without_a_ratio(figures: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs of figures, must be some, and all above zero"):
        paired_ratio(figures, [1.0] * len(figures))
