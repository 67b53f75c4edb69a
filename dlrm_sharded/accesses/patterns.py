"""Patterns of accesses to tables: how often a batch uses which of a table's ids.

Real accesses are not Zipf-distributed. With the synthetic patterns here, a cost model is fitted and
tested on accesses like real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlrm_sharded.accesses.distribution import AccessDistribution
from dlrm_sharded.accesses.zipf import cached_zipf

DLRM_DATASETS_ACCESSES = (
    *(0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052),
    *(0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019),
)
"""Share of the accesses by the reuse bin of their row, in all 856 tables of Meta's dlrm_datasets at
batch 65,536 (https://github.com/facebookresearch/dlrm_datasets)."""

USES_OF_BIN = np.array([0.25, *2.0 ** np.arange(0.5, len(DLRM_DATASETS_ACCESSES) - 1)])
"""Expected uses of a row of each reuse bin: the middle of the bin, on a log scale. Most rows that a
batch uses once have an expectation below 1; with 0.25, the used rows of tables with enough rows
have 7 uses on average, close to the published mean of 6.9."""


MAX_EXPONENT = 1.25
HOT_ROWS, HOT_ACCESSES = (1e-4, 0.1), (0.3, 0.95)
"""Ranges of `draw_accesses`: the largest Zipf exponent, the share of hot rows (on a log scale) and
the share of the accesses that go to them."""


class AccessPattern(Protocol):
    """A family of distributions, one for each size of a table."""

    def distribution(self, num_rows: int, num_draws: float) -> AccessDistribution:
        """Return the distribution of the accesses to a table of `num_rows`.

        Args:
            num_draws: expected number of ids in a batch.
        """


@dataclass(frozen=True, slots=True)
class ZipfAccesses:
    """Accesses to the i-th most popular row with probability proportional to i ** -exponent."""

    exponent: float

    def distribution(self, num_rows: int, num_draws: float) -> AccessDistribution:
        return cached_zipf(num_rows, self.exponent)


@dataclass(frozen=True, slots=True)
class UniformAccesses:
    """Accesses to all rows with the same probability."""

    def distribution(self, num_rows: int, num_draws: float) -> AccessDistribution:
        return AccessDistribution(np.array([0.0, num_rows]), np.ones(1))


@dataclass(frozen=True, slots=True)
class HotSetAccesses:
    """Accesses to few hot rows and to a long tail, evenly within each of the two.

    Args:
        hot_rows: share of the table's rows that are hot; at least one row is.
        hot_accesses: share of the accesses that go to them.
    """

    hot_rows: float
    hot_accesses: float

    def distribution(self, num_rows: int, num_draws: float) -> AccessDistribution:
        if num_rows == 1:
            return UniformAccesses().distribution(num_rows, num_draws)
        num_hot = min(max(round(self.hot_rows * num_rows), 1), num_rows - 1)
        mass = np.array([self.hot_accesses, 1.0 - self.hot_accesses])
        return AccessDistribution(np.array([0.0, num_hot, num_rows]), mass)


@dataclass(frozen=True, slots=True)
class ReuseBinAccesses:
    """Accesses with given shares of reuse bins, by default of Meta's dlrm_datasets.

    The rows of a bin share its accesses evenly, so that each has the uses of the bin. A table with
    too few rows for that has fewer in each bin, in the same proportions. Rows that are left over
    are never used.

    Args:
        shares: share of the accesses by the reuse bin of their row, see `DLRM_DATASETS_ACCESSES`.
    """

    shares: tuple[float, ...] = DLRM_DATASETS_ACCESSES

    @classmethod
    def of_histogram(cls, histogram: Sequence[float]) -> ReuseBinAccesses:
        """Return the accesses of a table with a `Table.reuse_histogram`, which counts rows."""
        uses = np.array([1.0, *USES_OF_BIN[1:]])
        accesses = np.array(histogram) * uses
        return cls(tuple((accesses / accesses.sum()).tolist()))

    def distribution(self, num_rows: int, num_draws: float) -> AccessDistribution:
        mass = np.array(self.shares)
        bin_rows = max(num_draws, 1.0) * mass / USES_OF_BIN
        bin_rows *= min(1.0, num_rows / bin_rows.sum())
        # The most used rows come first, and a bin with less than a row joins its neighbor.
        edges = np.concatenate([[0.0], np.cumsum(bin_rows[::-1])]).round()
        edges[-1] = max(edges[-1], 1.0)
        is_there = np.diff(edges) > 0
        last = np.flatnonzero(is_there)[-1]
        first_of_group = np.concatenate([[0], np.flatnonzero(is_there)[:-1] + 1])
        masses = np.add.reduceat(mass[::-1], first_of_group)
        return AccessDistribution(
            np.concatenate([[0.0], edges[1:][is_there]]),
            masses if last else mass.sum(keepdims=True),
        )


def draw_accesses(rng: np.random.Generator, zipf_share: float) -> AccessPattern:
    """Draw a pattern, which is Zipf-distributed with probability `zipf_share`."""
    if rng.random() < zipf_share:
        return ZipfAccesses(float(rng.uniform(0.0, MAX_EXPONENT)))
    kind = rng.integers(3)
    if kind == 0:
        return UniformAccesses()
    if kind == 1:
        return ReuseBinAccesses()
    low, high = np.log(HOT_ROWS)
    hot_rows = float(np.exp(rng.uniform(low, high)))
    return HotSetAccesses(hot_rows, float(rng.uniform(*HOT_ACCESSES)))
