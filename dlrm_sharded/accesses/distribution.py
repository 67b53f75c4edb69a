"""Distributions of a table's accesses over its ids: samples, and the expected reuse in a batch.

A rank here is the place of an id in the order of popularity, from 0.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.plans.tables import NUM_REUSE_BINS

_NUM_CELLS_LOG2 = 12
NO_REUSE = 1e-6
"""Expected uses of the most popular rank below which the share of reused ones is rounding error."""

_CELL_SHIFT = np.uint64(64 - _NUM_CELLS_LOG2)
_FRACTION_MASK = np.uint64(2 ** (64 - _NUM_CELLS_LOG2) - 1)


class AccessDistribution:
    """Accesses to popularity ranks, which fall into ranges of equally probable ones.

    Sampling is fast because the inverse of the cumulative distribution is linear between 4,096
    equally likely knots.

    Args:
        edges: [R + 1], first rank of each range, and the number of ranks that are ever drawn.
        mass: [R], positive weights of the ranges.
    """

    def __init__(self, edges: NDArray[np.float64], mass: NDArray[np.float64]) -> None:
        self._edges = edges
        self._ranks_per_range = np.diff(edges)
        self._mass = mass / mass.sum()

    @functools.cached_property
    def _cells(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """First rank of each cell between two knots, and ranks per unit of the lower bits."""
        cumulative = np.concatenate([[0.0], np.cumsum(self._mass)])
        cumulative[-1] = 1.0
        knots = np.interp(np.linspace(0.0, 1.0, 2**_NUM_CELLS_LOG2 + 1), cumulative, self._edges)
        knots[-1] *= 1.0 - 1e-12  # rounding must not reach the end
        return knots[:-1], np.diff(knots) * 2.0 ** -(64 - _NUM_CELLS_LOG2)

    def ranks(self, bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return [N], the ranks that [N] words of 64 random bits draw."""
        # the upper bits choose a cell between two knots, the lower ones a point inside it
        start, slope = self._cells
        cell = (bits >> _CELL_SHIFT).view(np.int64)
        rank = (bits & _FRACTION_MASK).view(np.int64).astype(np.float64)
        rank *= slope[cell]
        rank += start[cell]
        return rank.astype(np.int64)

    def expected_num_unique(self, num_draws: float) -> float:
        """Return the expected number of distinct ranks in `num_draws` draws."""
        return float(self._ranks_per_range @ -np.expm1(-self._expected_uses(num_draws)))

    def expected_reuse_histogram(self, num_draws: float) -> tuple[float, ...]:
        """Return the expected `reuse_histogram` of `num_draws` draws; zeros for no draws.

        The number of uses of a rank is binomial; its Poisson limit for many draws is used.
        """
        num_unique = self.expected_num_unique(num_draws)
        if num_unique == 0.0:
            return (0.0,) * NUM_REUSE_BINS
        uses = self._expected_uses(num_draws)
        if uses.max() < NO_REUSE:
            return (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)
        # [bins + 1, R], probability of at most 0, 1, 2, 4, ... uses of a rank
        at_most = np.ones((NUM_REUSE_BINS + 1, len(uses)))
        at_most[0] = np.exp(-uses)
        from scipy.special import gammaincc  # takes longer to load than a heuristic to plan

        for i in range(NUM_REUSE_BINS - 1):
            limit = 2.0**i + 1.0
            spread = 8.0 * math.sqrt(limit)  # below and above it the probability is 1 and 0
            near = uses > limit - spread
            at_most[i + 1, near] = 0.0
            near &= uses < limit + 2.0 * spread + 20.0
            at_most[i + 1, near] = gammaincc(limit, uses[near])
        in_bin = np.maximum(np.diff(at_most, axis=0), 0.0) @ self._ranks_per_range
        return tuple(np.minimum(in_bin / num_unique, 1.0).tolist())

    def _expected_uses(self, num_draws: float) -> NDArray[np.float64]:
        """Return [R], the expected uses of a single rank of each range."""
        return num_draws * self._mass / self._ranks_per_range
