"""Vocabularies: which values of the training rows have their own row in their table.

Rows of a table:
    0    missing values
    1    values that are rarer than `min_count` in the training rows, or do not occur there
    2 .. all others, ascending by their keys. Keys are hashes, so this order does not depend on the
         order of the data, and it scatters popular values over the table, so that row blocks are
         accessed about equally often.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from dlrm_sharded.datasets.columns import MISSING_KEY, Keys
from dlrm_sharded.datasets.schema import NUM_RESERVED, TableOptions

MISSING_ROW, RARE_ROW = 0, 1

MERGE_AT = 1 << 20
"""Number of a table's waiting keys from which they are counted."""

SPILL_AT = 1 << 22
"""Number of counted and waiting keys of all tables above which the counts are written to disk."""

RANGE_PAIRS = 1 << 22
"""Number of counts that are summed at once when a vocabulary is made."""

_MAX_PREFIX_BITS = 24
_COUNTED = {"key": pl.UInt64, "count": pl.UInt64}


class KeyCounts:
    """Counts the keys of one input file by table, on disk if there are many.

    Args:
        prefix: beginning of the names of the files that `spill` writes.
    """

    def __init__(self, folder: Path, prefix: str, num_tables: int) -> None:
        self._folder, self._prefix = folder, prefix
        self._waiting: list[list[Keys]] = [[] for _ in range(num_tables)]
        self._num_waiting = [0] * num_tables
        self._counted = [pl.DataFrame(schema=_COUNTED)] * num_tables
        self._num_spilled = 0

    def add(self, table: int, keys: Keys) -> None:
        """Count the keys of the table with this number."""
        self._waiting[table].append(keys)
        self._num_waiting[table] += len(keys)
        # merging only when as many wait as are counted takes a logarithmic number of passes
        if self._num_waiting[table] > max(MERGE_AT, len(self._counted[table])):
            self._merge(table)
        if sum(self._num_waiting) + sum(map(len, self._counted)) > SPILL_AT:
            self.spill()

    def spill(self) -> None:
        """Write the counts to a file, if there are any, and forget them."""
        for table in range(len(self._waiting)):
            self._merge(table)
        by_table = [
            counted.select(pl.lit(table, pl.UInt16).alias("table"), pl.all()).sort("key")
            for table, counted in enumerate(self._counted)
            if len(counted)
        ]
        if by_table:
            path = self._folder / f"{self._prefix}-{self._num_spilled:05}.parquet"
            pl.concat(by_table).write_parquet(path, row_group_size=RANGE_PAIRS // 16)
        self._counted = [pl.DataFrame(schema=_COUNTED)] * len(self._waiting)
        self._num_spilled += 1

    def _merge(self, table: int) -> None:
        if self._num_waiting[table]:
            keys = pl.DataFrame({"key": np.concatenate(self._waiting[table])})
            new = keys.group_by("key").agg(pl.len().cast(pl.UInt64).alias("count"))
            counts = pl.concat([self._counted[table], new])
            self._counted[table] = counts.group_by("key").agg(pl.sum("count"))
            self._waiting[table], self._num_waiting[table] = [], 0


def write_vocabulary(path: Path, counts: Sequence[Path], number: int, table: TableOptions) -> None:
    """Write the keys that have a row, ascending, and at the end a number above all of them.

    Args:
        path: an .npy file of uint64, which `Vocabulary` maps into memory.
        counts: files of `KeyCounts`.
        number: number of the table in these files.
    """
    ranges: list[pl.DataFrame] = []
    if counts:
        pairs = pl.scan_parquet(list(counts), glob=False).filter(pl.col("table") == number)
        num_pairs = pairs.select(pl.len()).collect().item()
        num_ranges = num_pairs // RANGE_PAIRS + 1
        bounds = [number * 2**64 // num_ranges for number in range(num_ranges + 1)]
        key = pl.col("key")
        ranges = [
            pairs.filter((key != MISSING_KEY) & key.is_between(low, high - 1))
            .group_by("key")
            .agg(pl.sum("count"))
            .filter(pl.col("count") >= table.min_count)
            .sort("key")
            .select("key" if table.rows is None else pl.all())
            .collect()
            for low, high in itertools.pairwise(bounds)
        ]
    num_kept = sum(map(len, ranges))
    if table.rows is not None and num_kept > (most := table.rows - NUM_RESERVED):
        # the count of the first id that does not fit: equally rare ids go, too
        too_rare = pl.concat([of["count"] for of in ranges]).top_k(most + 1).min()
        ranges = [of.filter(pl.col("count") > too_rare) for of in ranges]
        num_kept = sum(map(len, ranges))
    with path.open("wb") as file:
        form = {"descr": "<u8", "fortran_order": False, "shape": (num_kept + 1,)}
        np.lib.format.write_array_header_1_0(file, form)
        for keys in [*(of["key"] for of in ranges), pl.Series([2**64 - 1], dtype=pl.UInt64)]:
            file.write(keys.to_numpy().data)


class Vocabulary:
    """Maps keys to rows of a table.

    Args:
        path: a file of `write_vocabulary`, whose pages are shared by all processes of a host.
    """

    def __init__(self, path: Path) -> None:
        self._keys: Keys = np.load(path, mmap_mode="r")
        num_keys = len(self._keys) - 1
        self.num_embeddings = NUM_RESERVED + num_keys
        # _start[p]: the position of the first key whose upper bits are at least p
        bits = min(num_keys.bit_length() + 1, _MAX_PREFIX_BITS)
        self._shift = np.uint64(64 - bits)
        bounds = np.arange(2**bits, dtype=np.uint64) << self._shift
        self._start = np.searchsorted(self._keys, bounds).astype(np.int32)

    def rows(self, keys: Keys) -> npt.NDArray[np.int32]:
        """Return [N], the rows of N keys.

        Keys are uniform, so the first one with the same upper bits is the right one or near it.
        """
        position = self._start[keys >> self._shift]
        short = np.flatnonzero(self._keys[position] < keys)
        while len(short):
            position[short] += 1
            short = short[self._keys[position[short]] < keys[short]]
        has_row = self._keys[position] == keys
        rows = np.where(has_row, position + np.int32(NUM_RESERVED), np.int32(RARE_ROW))
        rows[keys == MISSING_KEY] = MISSING_ROW
        return rows
