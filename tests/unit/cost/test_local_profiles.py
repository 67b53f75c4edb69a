"""Profiles of a rank's samples against ids that are really dealt out to ranks."""

import numpy as np
import pytest

from dlrm_sharded.cost.local_profiles import local_histograms
from dlrm_sharded.plans.tables import NUM_REUSE_BINS

ENDS = 2 ** np.arange(NUM_REUSE_BINS - 1)


def histogram(uses: np.ndarray) -> np.ndarray:
    """Return the reuse histogram [17] of ids with so many uses; those of 0 do not count."""
    uses = uses[uses > 0]
    counts = np.bincount(np.searchsorted(ENDS, uses), minlength=NUM_REUSE_BINS)
    return counts / counts.sum()


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_against_ids_dealt_out(world_size: int) -> None:
    rng = np.random.default_rng(0)
    # The middles of the bins, as use counts within one are not known.
    uses = rng.choice(
        [1, 2, 3, 6, 12, 96, 768], size=200_000, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05]
    )
    dealt = rng.binomial(uses, 1.0 / world_size)

    (local,) = local_histograms(histogram(uses)[None], world_size)

    assert local == pytest.approx(histogram(dealt), abs=0.01)


def test_one_rank_sees_everything() -> None:
    histograms = np.eye(NUM_REUSE_BINS)
    assert (local_histograms(histograms, 1) == histograms).all()


def test_a_table_without_a_profile_stays_without() -> None:
    assert not local_histograms(np.zeros((1, NUM_REUSE_BINS)), 4).any()


def test_every_bin_is_dealt_out_completely() -> None:
    local = local_histograms(np.eye(NUM_REUSE_BINS), 4)
    assert local.sum(axis=1) == pytest.approx(np.ones(NUM_REUSE_BINS))
    # Rows of the last bin are used 49,152 times, 12,288 of them by each rank.
    assert local[-1].argmax() == np.searchsorted(ENDS, 12_288)
