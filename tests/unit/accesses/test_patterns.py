"""Patterns of accesses: what is drawn from them has the histogram that is expected of them."""

import numpy as np
import pytest
import torch

from dlrm_sharded.accesses.patterns import (
    AccessPattern,
    HotSetAccesses,
    ReuseBinAccesses,
    UniformAccesses,
    ZipfAccesses,
)
from dlrm_sharded.datasets.base import reuse_histogram
from dlrm_sharded.datasets.counter_random import counters, random_bits

NUM_DRAWS = 300_000
PATTERNS = {
    "zipf": ZipfAccesses(0.9),
    "uniform": UniformAccesses(),
    "hot_set": HotSetAccesses(hot_rows=0.01, hot_accesses=0.6),
    "reuse_bins": ReuseBinAccesses(),
}


def drawn(pattern: AccessPattern, num_rows: int) -> np.ndarray:
    bits = random_bits(1, counters(0, NUM_DRAWS))
    return pattern.distribution(num_rows, NUM_DRAWS).ranks(bits)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 3_000, 200_000])
@pytest.mark.parametrize("name", PATTERNS)
def test_expectations_are_what_draws_show(name: str, num_rows: int) -> None:
    ranks = torch.from_numpy(drawn(PATTERNS[name], num_rows))
    distribution = PATTERNS[name].distribution(num_rows, NUM_DRAWS)
    assert 0 <= int(ranks.min()) <= int(ranks.max()) < num_rows
    tolerance = 0.01 if name == "zipf" else 0.02
    num_unique = ranks.unique().numel()
    assert distribution.expected_num_unique(NUM_DRAWS) == pytest.approx(num_unique, rel=tolerance)
    expected = distribution.expected_reuse_histogram(NUM_DRAWS)
    assert sum(expected) == pytest.approx(1.0)
    if name == "zipf" or num_rows not in (7, 3_000):  # few rows are in a bin, and near its edge
        assert expected == pytest.approx(reuse_histogram(ranks), abs=tolerance)


def test_hot_rows_have_their_share() -> None:
    ranks = drawn(PATTERNS["hot_set"], 200_000)
    assert (ranks < 2_000).mean() == pytest.approx(0.6, abs=0.01)
    counts = np.bincount(ranks, minlength=200_000)
    assert counts[:1_000].sum() == pytest.approx(counts[1_000:2_000].sum(), rel=0.03)


def test_reuse_bins_have_the_published_mean_reuse() -> None:
    """6.9 uses of each used row, where the table has enough rows; others are used more often."""
    accesses = ReuseBinAccesses()
    num_unique = accesses.distribution(10**6, NUM_DRAWS).expected_num_unique(NUM_DRAWS)
    assert NUM_DRAWS / num_unique == pytest.approx(6.9, rel=0.05)
    few = accesses.distribution(1000, NUM_DRAWS).expected_num_unique(NUM_DRAWS)
    assert few < 1000


@pytest.mark.parametrize("num_draws", [0.0, 1e-300, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("name", PATTERNS)
def test_hardly_any_draws(name: str, num_draws: float) -> None:
    """Rounding once left shares that did not sum to 1, which a table refuses."""
    for num_rows in (1, 50, 10**7):
        distribution = PATTERNS[name].distribution(num_rows, num_draws)
        histogram = distribution.expected_reuse_histogram(num_draws)
        assert sum(histogram) == pytest.approx(1.0 if num_draws else 0.0, abs=1e-6)
