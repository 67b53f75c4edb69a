"""The bounded Zipf distribution: samples of it, and the expected reuse of ids in a batch."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincc

from dlrm_sharded.tables import NUM_REUSE_BINS

_NUM_CELLS_LOG2 = 12
_NUM_EXACT_RANKS = 512
_RANGES_PER_OCTAVE = 32
_CELL_SHIFT = np.uint64(64 - _NUM_CELLS_LOG2)
_FRACTION_MASK = np.uint64(2 ** (64 - _NUM_CELLS_LOG2) - 1)


class Zipf:
    """Ranks 0 .. num_ids - 1 with probability proportional to (rank + 1) ** -exponent.

    Two approximations make sampling fast. Only the 512 most popular ranks have their exact
    probability; the others share that of their range of 1/32 octave evenly. And the inverse of the
    cumulative distribution is linear between 4,096 equally likely knots. For exponents up to 1.1
    the total variation distance to the exact distribution is below 0.002.
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

    def ranks(self, bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return [N], the ranks for [N] times 64 random bits; rank 0 is the most popular."""
        # the upper bits choose a cell between two knots, the lower ones a point inside it
        cell = (bits >> _CELL_SHIFT).view(np.int64)
        rank = (bits & _FRACTION_MASK).view(np.int64).astype(np.float64)
        rank *= self._cell_slope[cell]
        rank += self._cell_start[cell]
        return rank.astype(np.int64)

    def expected_num_unique(self, num_draws: float) -> float:
        """Return the expected number of different ranks in `num_draws` draws."""
        return float(self._ranks_per_range @ -np.expm1(-self._expected_uses(num_draws)))

    def expected_reuse_histogram(self, num_draws: float) -> tuple[float, ...]:
        """Return the expected `reuse_histogram` of `num_draws` draws; zeros for no draws.

        The number of uses of a rank is binomial; its limit for many draws, Poisson, is used.
        """
        num_unique = self.expected_num_unique(num_draws)
        if num_unique == 0.0:
            return (0.0,) * NUM_REUSE_BINS
        uses = self._expected_uses(num_draws)
        # [bins + 1, R], probability of at most 0, 1, 2, 4, ... uses of a rank
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
        """Return [R], the expected uses of a single rank of each range."""
        uses: NDArray[np.float64] = num_draws * self._mass / self._ranks_per_range
        return uses


@functools.lru_cache(maxsize=4096)
def cached_zipf(num_ids: int, exponent: float) -> Zipf:
    """Return a `Zipf` that equal tables share; each holds about 80 kB."""
    return Zipf(num_ids, exponent)


def scatter_ranks(ranks: NDArray[np.int64], num_ids: int, shift: int) -> NDArray[np.int64]:
    """Return [N], the id of each rank, such that popular ids are scattered over the table.

    The map is one to one: rank * stride + shift modulo num_ids. The stride is near the golden
    section of the table and has no common divisor with it. Ids are exact up to 2 ** 31 rows.
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
    """Return the first rank of each range, and num_ids; after single ranks, ranges grow evenly."""
    head = np.arange(min(num_ids, _NUM_EXACT_RANKS) + 1, dtype=np.float64)
    if num_ids <= _NUM_EXACT_RANKS:
        return head
    num_ranges = math.ceil(_RANGES_PER_OCTAVE * math.log2(num_ids / _NUM_EXACT_RANKS))
    tail = np.geomspace(_NUM_EXACT_RANKS, num_ids, num_ranges + 1).round()
    return np.unique(np.concatenate([head, tail]))


def _range_masses(edges: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Return the sum of (rank + 1) ** -exponent over each range, for long ranges the integral."""
    num_single = int(min(edges[-1], _NUM_EXACT_RANKS))
    single = np.arange(1.0, num_single + 1.0) ** -exponent
    bounds = edges[num_single:] + 0.5
    power = 1.0 - exponent
    integral = np.log(bounds) if power == 0.0 else bounds**power / power
    return np.concatenate([single, np.diff(integral)])
