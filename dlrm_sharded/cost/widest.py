"""The time that the widest shard of a rank adds to its lookups on a GPU.

FBGEMM looks up all shards of a rank with one launch, whose groups of threads are as large as the
widest shard needs, in both directions (its dispatch macros read `max_D`): beside a table of 128
columns, a row of 16 columns keeps 4 of 32 threads busy. So a lookup takes as long as if each of the
rank's ids had a group of that size.

A rank's time in this is its ids times a unit cost of its widest shard. Neither is a sum over
shards, but both follow from sums: the ids, and how many shards need groups of each size. These
counts are whole numbers, which adding and subtracting leaves exact. Row blocks have launches of
their own, but are counted as if they shared the launch of the column shards.

Letters: S shards, N ranks, G sizes of thread groups, A = 1 + G, Q = 2 terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import GROUP_COLUMNS, WARP_COLUMNS, thread_groups
from dlrm_sharded.cost.workload import Floats, Indices, Workload

WIDEST_TERMS = ("ids_in_first_warp", "ids_in_next_warps")
"""A rank's ids times the part of a warp that handles a row, and times the number of further warps.

Each has its own unit cost, because FBGEMM shares a warp among rows of up to 128 columns, and
goes through wider rows in steps.
"""

_WARPS = GROUP_COLUMNS / WARP_COLUMNS
# [1 + G, Q], the terms of one id by the group; the first row is for ranks without shards
_TERMS_OF_GROUP = np.vstack(
    [np.zeros(2), np.column_stack([np.minimum(_WARPS, 1.0), np.maximum(_WARPS - 1.0, 0.0)])]
)

# [G], place values of a number whose digits count the shards that need groups of each size
_DIGIT_BITS = 32
_DIGITS = 2.0 ** (_DIGIT_BITS * np.arange(len(GROUP_COLUMNS)))


@dataclass(frozen=True, slots=True, eq=False)
class WidestShard:
    """Unit costs of `WIDEST_TERMS` on GPUs; the crowding of `ComputeModel`.

    Args:
        term_ms: [2, Q], ms per 1,000 in both directions, not negative.
    """

    term_ms: Floats

    @property
    def num_parts(self) -> int:
        """Q, the parts of a time in each direction."""
        return self.term_ms.shape[1]

    def scaled(self, factors: Floats) -> WidestShard:
        """Return the costs multiplied by factors [2, Q]."""
        return WidestShard(self.term_ms * factors)

    def columns(self, workload: Workload) -> Floats:
        """Return [S, A], thousands of ids of each shard, and a 1 at its thread group."""
        is_group = thread_groups(workload)[:, None] == np.arange(len(GROUP_COLUMNS))
        return np.column_stack([workload.num_ids / 1e3, is_group])

    def parts_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [2, N, Q], time of the terms of shards [N, A] in a crowd [N, A]."""
        return widest_terms(vectors, crowd) * self.term_ms[:, None]

    def added_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [..., 2], see `ComputeModel.crowding_ms`."""
        return crowding_terms(vectors, crowd) @ self.term_ms.T


def widest_terms(vectors: Floats, crowd: Floats) -> Floats:
    """Return [..., Q], the `WIDEST_TERMS` of shards, in thousands.

    They never fall when shards are added to the crowd.

    Args:
        vectors: [..., A], sums over shards on one rank.
        crowd: [..., A], sums over all shards of that rank.
    """
    return vectors[..., :1] * _TERMS_OF_GROUP[_widest_group(crowd)]


def crowding_terms(vectors: Floats, crowd: Floats) -> Floats:
    """Return [..., Q], by how much the terms of shards and a crowd grow if they share a rank.

    Args:
        vectors, crowd: [..., A], sums over shards; they are broadcast.
    """
    ids, crowd_ids = vectors[..., :1], crowd[..., :1]
    group, crowd_group = _widest_group(vectors), _widest_group(crowd)
    widest = np.maximum(group, crowd_group)
    together = (ids + crowd_ids) * _TERMS_OF_GROUP.take(widest, axis=0)
    apart = ids * _TERMS_OF_GROUP.take(group, axis=0)
    return together - (apart + crowd_ids * _TERMS_OF_GROUP.take(crowd_group, axis=0))


def _widest_group(crowd: Floats) -> Indices:
    """Return [...], the number of the largest thread group in use, from 1; 0 without any."""
    # Differences of exact counts are exact, so these are whole numbers. If they are the digits of
    # one number, its exponent gives the first digit that is not zero.
    _, exponent = np.frexp(crowd[..., 1:] @ _DIGITS)
    return (exponent + (_DIGIT_BITS - 1)) // _DIGIT_BITS
