"""How many times as much one kind of run takes as another, from pairs of measurements.

Figures that were measured in the same round share its hosts, minutes and load, so their ratio tells
more than the ratio of two means. Nothing is assumed about the distribution of ratios but that their
logarithms are symmetric around the true one. The estimate is the median of all pairwise means
(Hodges and Lehmann, 1963), and the interval that of Wilcoxon's signed ranks (Hollander, Wolfe and
Chicken, Nonparametric Statistical Methods, section 3.3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

CONFIDENCE = 0.95
MAX_EXACT = 40
"""Largest number of pairs whose distribution of signed ranks is counted out."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A ratio of two figures, estimated from pairs.

    Args:
        ratio: the first figure over the second.
        low, high: ends of the interval with `CONFIDENCE`; 0 and infinity for fewer than 6 pairs,
            which can tell nothing with that confidence.
        num_pairs: number of pairs.
    """

    ratio: float
    low: float
    high: float
    num_pairs: int

    @property
    def is_tie(self) -> bool:
        """Return whether the pairs do not tell the two apart."""
        return self.low <= 1.0 <= self.high

    def pairs_to_tell(self, difference: float) -> int:
        """Return about how many pairs would tell a difference, such as 0.02, from none.

        The interval shrinks with the root of the number of pairs. Without an interval, as many as
        are needed for one.
        """
        least = least_pairs(CONFIDENCE)
        if self.num_pairs < least:
            return least
        half_width = math.log(self.high / self.low) / 2
        needed = self.num_pairs * (half_width / math.log1p(difference)) ** 2
        return max(least, math.ceil(needed))


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> PairedRatio:
    """Estimate the ratio of two figures from pairs of them, all above zero.

    Raises:
        ValueError: there is no pair, or a figure is not above zero.
    """
    figures = np.array([first, second], dtype=float)
    if figures.size == 0 or not ((figures > 0) & np.isfinite(figures)).all():
        raise ValueError(f"{len(first)} pairs of figures, must be some, and all above zero")
    logs = np.log(figures[0]) - np.log(figures[1])
    means = _walsh_averages(logs)
    ratio = math.exp(float(np.median(means)))
    rank = _rank_of_end(len(logs), CONFIDENCE)
    if rank is None:
        return PairedRatio(ratio, 0.0, math.inf, len(logs))
    return PairedRatio(ratio, math.exp(means[rank]), math.exp(means[-1 - rank]), len(logs))


def least_pairs(confidence: float) -> int:
    """Return the number of pairs from which on there is an interval: 6 for 0.95.

    Of n pairs, all have one sign by chance in 2^(1 - n) of all cases.
    """
    return math.ceil(1 - math.log2(1 - confidence))


def _walsh_averages(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [n (n + 1) / 2], the means of all pairs of values and each value itself, in order."""
    first, second = np.triu_indices(len(values))
    return np.sort((values[first] + values[second]) / 2)


def _rank_of_end(num: int, confidence: float) -> int | None:
    """Return which of the ordered means is the lower end of the interval; None if none is."""
    tail = (1 - confidence) / 2
    if num <= MAX_EXACT:
        probabilities = np.cumsum(_signed_rank_counts(num)) / 2.0**num
        rank = int(np.searchsorted(probabilities, tail, side="right")) - 1
        return rank if rank >= 0 else None
    mean, variance = num * (num + 1) / 4, num * (num + 1) * (2 * num + 1) / 24
    return max(0, math.floor(mean + float(norm.ppf(tail)) * math.sqrt(variance)))


@functools.cache
def _signed_rank_counts(num: int) -> NDArray[np.float64]:
    """Return in how many ways signed ranks of a number of pairs have each sum, from 0 on."""
    counts = np.zeros(num * (num + 1) // 2 + 1)
    counts[0] = 1
    for rank in range(1, num + 1):
        counts[rank:] += counts[:-rank].copy()
    return counts
