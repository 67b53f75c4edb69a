"""Bounded Zipf: how skewed accesses to a table are drawn, and what a batch of them looks like."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc

from dlrm_sharded.tables import NUM_REUSE_BINS

Bits = NDArray[np.uint64]
"""[N], 64 random bits each."""

_NUM_CELLS_LOG2 = 12
_NUM_EXACT_RANKS = 512
_RANGES_PER_OCTAVE = 32
_CELL_SHIFT = np.uint64(64 - _NUM_CELLS_LOG2)
_FRACTION_MASK = np.uint64(2 ** (64 - _NUM_CELLS_LOG2) - 1)


class Zipf:
    """Ranks 0 .. num_ids - 1, drawn with probability proportional to (rank + 1) ** -exponent.

    Sampled by inversion of the cumulative distribution, kept at 4,096 equally likely knots and
    linear between them. Before that it is exact for the 512 most popular ranks; the others are in
    ranges of 1/32 octave that have their mass, evenly spread. For exponents up to 1.1 the total
    variation distance to the exact distribution is below 0.002.
    """

    def __init__(self, num_ids: int, exponent: float) -> None:
        self.num_ids = num_ids
        self.exponent = exponent
        edges = _range_edges(num_ids)
        mass = _range_masses(edges, exponent)
        self._ranks_per_range = np.diff(edges)
        self._mass = mass / mass.sum()
        cumulative = np.concatenate([[0.0], np.cumsum(self._mass)])
        cumulative[-1] = 1.0
        knots = np.interp(np.linspace(0.0, 1.0, 2**_NUM_CELLS_LOG2 + 1), cumulative, edges)
        knots[-1] *= 1.0 - 1e-12  # rounding must not reach num_ids
        self._cell_start = knots[:-1]
        self._cell_slope = np.diff(knots) * 2.0 ** -(64 - _NUM_CELLS_LOG2)

    def ranks(self, bits: Bits) -> NDArray[np.int64]:
        """[N], the rank that each 64 random bits select; 0 is the most popular."""
        cell = (bits >> _CELL_SHIFT).view(np.int64)
        rank = (bits & _FRACTION_MASK).view(np.int64).astype(np.float64)
        rank *= self._cell_slope[cell]
        rank += self._cell_start[cell]
        return rank.astype(np.int64)

    def expected_num_unique(self, num_draws: float) -> float:
        """Ranks that `num_draws` draws use at least once, in the mean."""
        return float(self._ranks_per_range @ -np.expm1(-self._expected_uses(num_draws)))

    def expected_reuse_histogram(self, num_draws: float) -> tuple[float, ...]:
        """What `reuse_histogram` gives for `num_draws` draws, in the mean; zeros for no draws.

        The number of uses of one rank is binomial; it is taken as Poisson, its limit for many
        draws.
        """
        num_unique = self.expected_num_unique(num_draws)
        if num_unique == 0.0:
            return (0.0,) * NUM_REUSE_BINS
        uses = self._expected_uses(num_draws)
        at_most = np.ones((NUM_REUSE_BINS + 1, len(uses)))
        at_most[0] = np.exp(-uses)
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
        """[R], expected uses of one rank of each range."""
        uses: NDArray[np.float64] = num_draws * self._mass / self._ranks_per_range
        return uses


@functools.lru_cache(maxsize=4096)
def cached_zipf(num_ids: int, exponent: float) -> Zipf:
    """One `Zipf` for all tables that share it; each holds about 80 kB."""
    return Zipf(num_ids, exponent)


def scatter_ranks(ranks: NDArray[np.int64], num_ids: int, shift: int) -> NDArray[np.int64]:
    """[N], the id of each rank: popular ids lie all over the table, not in its first rows.

    A one-to-one map: rank * stride + shift modulo num_ids, with a stride near the golden section
    of the table that has no common divisor with it. Ids stay exact up to 2 ** 31 rows.
    """
    ids = ranks * _golden_stride(num_ids)
    ids += shift % num_ids
    ids -= ids // num_ids * num_ids  # twice as fast as the remainder operator
    return ids


@functools.lru_cache(maxsize=4096)
def _golden_stride(num_ids: int) -> int:
    stride = max(1, round(num_ids * (math.sqrt(5.0) - 1.0) / 2.0))
    while math.gcd(stride, num_ids) != 1:
        stride += 1
    return stride


def _range_edges(num_ids: int) -> NDArray[np.float64]:
    """First rank of each range, and num_ids at the end: single ranks, then even on a log scale."""
    head = np.arange(min(num_ids, _NUM_EXACT_RANKS) + 1, dtype=np.float64)
    if num_ids <= _NUM_EXACT_RANKS:
        return head
    num_ranges = math.ceil(_RANGES_PER_OCTAVE * math.log2(num_ids / _NUM_EXACT_RANKS))
    tail = np.geomspace(_NUM_EXACT_RANKS, num_ids, num_ranges + 1).round()
    return np.unique(np.concatenate([head, tail]))


def _range_masses(edges: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Sum of (rank + 1) ** -exponent over each range; an integral where it is not one rank."""
    num_single = int(min(edges[-1], _NUM_EXACT_RANKS))
    single = np.arange(1.0, num_single + 1.0) ** -exponent
    bounds = edges[num_single:] + 0.5
    power = 1.0 - exponent
    integral = np.log(bounds) if power == 0.0 else bounds**power / power
    return np.concatenate([single, np.diff(integral)])
