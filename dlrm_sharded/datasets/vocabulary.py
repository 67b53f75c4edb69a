"""The vocabulary of a categorical column maps its raw ids to rows of its table.

Raw ids are 32-bit hashes; 0 stands for a missing value. Rows of the table:
    0    missing values
    1    ids that are rarer than `min_count` in training, or do not occur there
    2 .. all other ids, ascending. This order does not depend on the order of the data and, because
         raw ids are hashes, it scatters popular ids over the table, so that row blocks are
         accessed equally often.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

MISSING = 0
RARE = 1
NUM_RESERVED = 2

RawIds = npt.NDArray[np.uint32]

MERGE_AT = 1 << 20
"""Number of pending ids below which the counter does not merge them into the others."""

_MAX_PREFIX_BITS = 26
_NUM_PROBES = 4


class IdCounter:
    """Counts ids that are added in pieces; its memory is proportional to the different ids."""

    def __init__(self) -> None:
        self._counts = pl.DataFrame(schema={"id": pl.UInt32, "count": pl.Int64})
        self._pending: list[pl.DataFrame] = []
        self._num_pending = 0

    def add(self, ids: RawIds) -> None:
        different, counts = np.unique(ids, return_counts=True)
        self._pending.append(pl.DataFrame({"id": different, "count": counts}))
        self._num_pending += len(different)
        # merging only when as many are pending as are merged takes a logarithmic number of passes
        if self._num_pending > max(MERGE_AT, len(self._counts)):
            self._merge()

    def ids(self, *, min_count: int) -> RawIds:
        """Return the ids counted at least `min_count` times, ascending, without 0."""
        self._merge()
        frequent = (pl.col("count") >= min_count) & (pl.col("id") != MISSING)
        return self._counts.filter(frequent)["id"].sort().to_numpy()

    def _merge(self) -> None:
        counts = pl.concat([self._counts, *self._pending])
        self._counts = counts.group_by("id").agg(pl.sum("count"))
        self._pending, self._num_pending = [], 0


class Vocabulary:
    """Maps raw ids to table rows.

    Args:
        ids: the ids that have a row of their own; ascending, without 0.
    """

    def __init__(self, ids: RawIds) -> None:
        self.num_embeddings = NUM_RESERVED + len(ids)
        # sentinels at both ends stop every search; 0 is a key, so that position + 1 is the row
        self._keys = np.concatenate([[0], ids, [2**32 - 1]]).astype(np.uint32)
        self._has_last = bool(len(ids)) and ids[-1] == self._keys[-1]
        # _start[p]: the position of the first key whose upper bits are p or more
        largest = int(ids[-1]) if len(ids) else 0
        bits = min(len(ids).bit_length() + 1, _MAX_PREFIX_BITS)
        self._shift = np.uint32(max(0, largest.bit_length() - bits))
        self._last_prefix = np.uint32(largest >> int(self._shift))
        prefixes = np.arange(int(self._last_prefix) + 1, dtype=np.uint64)
        bounds = (prefixes << np.uint64(self._shift)).astype(np.uint32)
        self._start = np.searchsorted(self._keys, bounds).astype(np.int32)

    def rows(self, ids: RawIds) -> npt.NDArray[np.int32]:
        """Return [N], the table rows of N raw ids.

        Raw ids are nearly uniform, so that the first key with the same upper bits is the right one
        or very near; ids that are not found in a few steps are found by bisection.
        """
        position = self._start[np.minimum(ids >> self._shift, self._last_prefix)]
        short = np.flatnonzero(self._keys[position] < ids)
        for _ in range(_NUM_PROBES):
            position[short] += 1
            short = short[self._keys[position[short]] < ids[short]]
            if not len(short):
                break
        else:
            position[short] = np.searchsorted(self._keys, ids[short])
        has_row = self._keys[position] == ids
        if not self._has_last:
            has_row &= ids != self._keys[-1]
        rows = np.where(has_row, position + np.int32(1), np.int32(RARE))
        rows[ids == MISSING] = MISSING
        return rows
