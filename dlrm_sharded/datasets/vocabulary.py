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

MISSING = 0
RARE = 1
NUM_RESERVED = 2

RawIds = npt.NDArray[np.uint32]

_COUNT_BITS = np.uint64(32)
_MAX_COUNT = 2**32 - 1
MERGE_AT = 1 << 20
"""Number of pending ids below which the counter does not merge them into the sorted ones."""

_MAX_PREFIX_BITS = 26
_NUM_PROBES = 4


class IdCounter:
    """Counts ids that are added in pieces; its memory is proportional to the different ids."""

    def __init__(self) -> None:
        # sorted, one number per id: the id in the upper 32 bits, its count in the lower 32
        self._packed = np.empty(0, np.uint64)
        self._pending: list[npt.NDArray[np.uint64]] = []
        self._num_pending = 0

    def add(self, ids: RawIds) -> None:
        ordered = np.sort(ids)
        first = _first_of_runs(ordered)
        counts = np.diff(first, append=len(ordered)).astype(np.uint64)
        self._pending.append(_pack(ordered[first], counts))
        self._num_pending += len(first)
        # merging only when as many are pending as are merged takes a logarithmic number of passes
        if self._num_pending > max(MERGE_AT, len(self._packed)):
            self._merge()

    def ids(self, *, min_count: int) -> RawIds:
        """Return the ids counted at least `min_count` times, ascending, without 0."""
        self._merge()
        counts = self._packed & np.uint64(_MAX_COUNT)
        ids = (self._packed[counts >= min_count] >> _COUNT_BITS).astype(np.uint32)
        return ids[1:] if len(ids) and ids[0] == MISSING else ids

    def _merge(self) -> None:
        packed = np.concatenate([self._packed, *self._pending])
        packed.sort(kind="stable")  # merges the sorted runs
        ids = (packed >> _COUNT_BITS).astype(np.uint32)
        first = _first_of_runs(ids)
        if len(first):
            counts = np.add.reduceat(packed & np.uint64(_MAX_COUNT), first)
            self._packed = _pack(ids[first], counts)
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


def _first_of_runs(ordered: RawIds) -> npt.NDArray[np.intp]:
    """Return the positions at which a new value begins."""
    if not len(ordered):
        return np.empty(0, np.intp)
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


def _pack(ids: RawIds, counts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return (ids.astype(np.uint64) << _COUNT_BITS) | np.minimum(counts, np.uint64(_MAX_COUNT))
