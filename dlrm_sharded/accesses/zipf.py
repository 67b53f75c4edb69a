"""The bounded Zipf distribution of accesses, and ids that scatter its ranks over a table."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.accesses.distribution import AccessDistribution


class Zipf(AccessDistribution):
    """Ranks 0 .. num_ids - 1 with probability proportional to (rank + 1) ** -exponent.

    Only the `num_exact` most popular ranks have their exact probability; the others share the
    probability of their range evenly. By default, and with the knots of `AccessDistribution`, the
    total variation distance to the exact distribution is below 0.002 for exponents up to 1.1.
    """

    def __init__(
        self, num_ids: int, exponent: float, *, num_exact: int = 512, ranges_per_octave: int = 32
    ) -> None:
        edges = _range_edges(num_ids, num_exact, ranges_per_octave)
        super().__init__(edges, _range_masses(edges, exponent, min(num_ids, num_exact)))


@functools.lru_cache(maxsize=4096)
def cached_zipf(num_ids: int, exponent: float) -> Zipf:
    """Return a `Zipf` that equal tables share; each holds about 80 kB."""
    return Zipf(num_ids, exponent)


def scatter_ranks(ranks: NDArray[np.int64], num_ids: int, shift: int) -> NDArray[np.int64]:
    """Return [N], the id of each popularity rank [N], scattered over the table.

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


def _range_edges(num_ids: int, num_exact: int, per_octave: int) -> NDArray[np.float64]:
    """Return the first rank of each range, and num_ids; after single ranks, ranges grow evenly."""
    head = np.arange(min(num_ids, num_exact) + 1, dtype=np.float64)
    if num_ids <= num_exact:
        return head
    num_ranges = math.ceil(per_octave * math.log2(num_ids / num_exact))
    tail = np.geomspace(num_exact, num_ids, num_ranges + 1).round()
    return np.unique(np.concatenate([head, tail]))


def _range_masses(
    edges: NDArray[np.float64], exponent: float, num_single: int
) -> NDArray[np.float64]:
    """Return the sum of (rank + 1) ** -exponent over each range; in long ones, the integral."""
    single = np.arange(1.0, num_single + 1.0) ** -exponent
    bounds = edges[num_single:] + 0.5
    power = 1.0 - exponent
    integral = np.log(bounds) if power == 0.0 else bounds**power / power
    return np.concatenate([single, np.diff(integral)])
