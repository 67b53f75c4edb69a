"""Miss-ratio curves: how often a batch misses rows in a cache, by the share of rows that it holds.

A curve is measured from stack distances, or expected from a Zipf distribution of the accesses. The
ratio counts the unique ids of a batch; each is fetched once, however often the batch uses it.

The model is a cache without sets that drops the row whose last batch is the longest ago. FBGEMM's
cache has sets of 32 rows, chosen by a hash;
docs/reference/cached_tables.md says how far the two differ.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.accesses.zipf import Zipf
from dlrm_sharded.host_memory.stack_distances import NEVER, Accesses
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table

Floats = NDArray[np.float64]

TOLERANCE = 0.001
"""Largest difference between a curve and the one of fewer points that stands for it."""

NUM_SIZES = 512
"""Number of sizes at which a curve is computed before points are left out."""

MAX_EXPONENT = 2.0
"""Largest Zipf exponent that a table without a measured curve is taken to have."""

_NUM_BISECTIONS = 20
_RANGES = {"num_exact": 64, "ranges_per_octave": 8}
"""Ranges of ranks of distributions that are evaluated hundreds of times."""

_MEAN_USES = np.concatenate([[1.0, 2.0], 2.0 ** np.arange(1, NUM_REUSE_BINS - 1) * 1.5])
"""Uses of an id of each reuse bin: (0, 1], (1, 2], and the middle of (2, 4], ..."""


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """Miss ratios of a table by the size of its cache, linear between the points.

    Args:
        points: shares of the table's rows, from 0 to 1, and the miss ratio at each; 0 at share 1,
            as every row then stays where it is.
    """

    points: tuple[tuple[float, float], ...]

    def ratios(self, shares: Floats) -> Floats:
        """Return [N], the miss ratios of caches with these shares of the rows."""
        points = np.array(self.points)
        return np.interp(shares, points[:, 0], points[:, 1])

    def ratio(self, share: float) -> float:
        """Return the miss ratio of one size."""
        return float(self.ratios(np.array([share]))[0])

    def with_tail_of(self, expected: MissRatioCurve) -> MissRatioCurve:
        """Return the curve that falls like an expected one where it was measured no further.

        A few batches use a small part of a large table. Larger caches than that have as many misses
        in them, those of rows that were not used before, of which more batches would see less.
        """
        shares, ratios = np.array(self.points).T
        if len(shares) < 3 or ratios[-2] == 0.0:
            return self
        end = int(np.argmax(ratios <= ratios[-2] + TOLERANCE))
        of_end = expected.ratio(float(shares[end]))
        tail = np.array([share for share, _ in expected.points if share > shares[end]])
        if of_end == 0.0 or not len(tail):
            return self
        falling = ratios[end] * expected.ratios(tail) / of_end
        return MissRatioCurve.through(
            np.concatenate([shares[: end + 1], tail]), np.concatenate([ratios[: end + 1], falling])
        )

    @classmethod
    def through(cls, shares: Floats, ratios: Floats) -> MissRatioCurve:
        """Return a curve through points [N] of rising shares, without those that say little."""
        shares = np.concatenate([[0.0], np.clip(shares, 0.0, 1.0), [1.0]])
        ratios = np.concatenate([[1.0], np.clip(ratios, 0.0, 1.0), [0.0]])
        # Rounding must leave shares that rise and ratios that do not.
        shares, place = np.unique(shares.round(9), return_index=True)
        ratios = np.minimum.accumulate(ratios[place].round(6))
        ratios[-1] = 0.0
        kept = _few_points(shares, ratios)
        return cls(tuple(zip(shares[kept].tolist(), ratios[kept].tolist(), strict=True)))


def measured_curve(accesses: Accesses, num_rows: int) -> MissRatioCurve:
    """Return the curve of a table whose accesses were recorded.

    The first half of the batches fills the cache and is not counted. A row's first use in the other
    half counts as a miss at all sizes but that of the whole table: what came before is not known.
    """
    sampling_rate = accesses.sampling_rate
    distance = accesses.distance[accesses.batch >= accesses.num_batches // 2]
    if not len(distance):
        return MissRatioCurve(((0.0, 0.0), (1.0, 0.0)))
    known = np.sort(distance[distance != NEVER])
    # A step of the curve lies between a distance and the next larger size.
    edges = known[np.linspace(0, max(len(known) - 1, 0), NUM_SIZES).astype(np.int64)[: len(known)]]
    # Rows that the counted batches use for the first time would miss in every cache but the table.
    last = max(num_rows - 1, 1) * sampling_rate
    sizes = np.unique(np.concatenate([edges, edges + 1, [last]]))
    num_missed = len(distance) - np.searchsorted(known, sizes)
    return MissRatioCurve.through(sizes / sampling_rate / num_rows, num_missed / len(distance))


def expected_curve(table: Table, batch_size: int) -> MissRatioCurve:
    """Return the curve of a table whose accesses are Zipf-distributed, by its reuse histogram.

    Che's approximation (IEEE JSAC, 2002): rows stay in a cache for the same number of batches T.
    Then it holds the rows that T batches use, and a batch misses what T + 1 batches use besides.
    """
    num_ids = batch_size * table.pooling_factor
    if num_ids == 0.0 or table.num_embeddings == 1:
        return MissRatioCurve(((0.0, 0.0), (1.0, 0.0)))
    exponent = _fitted_exponent(table.num_embeddings, num_ids, table.reuse_histogram)
    return _zipf_curve(table.num_embeddings, num_ids, exponent)


def curve_of(table: Table, batch_size: int) -> MissRatioCurve:
    """Return the measured curve of a table, or else the expected one."""
    if table.miss_ratio_curve is not None:
        return MissRatioCurve(table.miss_ratio_curve)
    return expected_curve(table, batch_size)


@functools.lru_cache(maxsize=4096)
def _zipf_curve(num_rows: int, num_ids: float, exponent: float) -> MissRatioCurve:
    distribution = Zipf(num_rows, exponent, **_RANGES)
    num_batches = np.geomspace(1e-2, 1e7, NUM_SIZES // 2)
    used = np.array([distribution.expected_num_unique(num_ids * t) for t in num_batches])
    more = np.array([distribution.expected_num_unique(num_ids * (t + 1)) for t in num_batches])
    one = distribution.expected_num_unique(num_ids)
    return MissRatioCurve.through(used / num_rows, np.minimum((more - used) / one, 1.0))


@functools.lru_cache(maxsize=4096)
def _fitted_exponent(num_rows: int, num_ids: float, histogram: tuple[float, ...] | None) -> float:
    """Return the Zipf exponent at which a batch uses an id as often as the histogram says."""
    low, high = 0.0, MAX_EXPONENT
    if histogram is None or not sum(histogram):
        return low
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        expected = Zipf(num_rows, middle, **_RANGES).expected_reuse_histogram(num_ids)
        if np.array(expected) @ _MEAN_USES < np.array(histogram) @ _MEAN_USES:
            low = middle
        else:
            high = middle
    return low


def _few_points(shares: Floats, ratios: Floats) -> NDArray[np.int64]:
    """Return the places of points whose polygon is within `TOLERANCE` (Douglas and Peucker)."""
    kept = {0, len(shares) - 1}
    spans = [(0, len(shares) - 1)]
    while spans:
        start, stop = spans.pop()
        inside = slice(start + 1, stop)
        line = np.interp(shares[inside], shares[[start, stop]], ratios[[start, stop]])
        error = np.abs(ratios[inside] - line)
        if len(error) and error.max() > TOLERANCE:
            middle = start + 1 + int(error.argmax())
            kept.add(middle)
            spans += [(start, middle), (middle, stop)]
    return np.array(sorted(kept))
