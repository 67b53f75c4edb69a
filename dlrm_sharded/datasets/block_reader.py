"""Reads rows of a folder of blocks in the format of `blocks.py`; files are memory-mapped."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dlrm_sharded.datasets.blocks import CONVERT_AGAIN, DTYPES, BlocksManifest, check_sizes
from dlrm_sharded.files.errors import DataError

MAX_MAPPED_PARTS = 32
"""Number of parts whose files stay mapped; each of a part's up to 6 files takes a descriptor."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Copies of n rows.

    Args:
        dense: [n, num_dense] fp32.
        labels: [n] fp32, 0 or 1.
        ids: [F1, n] int32, of the features of one id.
        lengths: [F2, n] int32, of the features that are lists.
        values: [sum of lengths] int32, ids of the lists: by feature, then by row.
    """

    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    values: npt.NDArray[np.int32]


class _Part(NamedTuple):
    """Memory-mapped arrays of a part; empty ones stand for files that it does not have."""

    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    values: npt.NDArray[np.int32]


class _Piece(NamedTuple):
    """Rows of a block."""

    part: _Part
    block: int
    rows: slice

    def lists(self) -> list[npt.NDArray[np.int32]]:
        """Return the ids of the lists, by feature."""
        part, block, rows = self
        starts, lengths = part.starts[block], part.lengths[block]
        first = starts + lengths[:, : rows.start].sum(axis=1)
        last = first + lengths[:, rows].sum(axis=1)
        return [part.values[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]


class BlockReader:
    """Reads rows of a folder of blocks; only the memory pages of these rows are loaded.

    Raises:
        DataError: the folder is not complete, or a file does not have the size it was written with.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = manifest = BlocksManifest.load(folder)
        self._folder = folder
        for part in manifest.parts:
            check_sizes(folder, part)
        self._part_starts = [0, *itertools.accumulate(part.num_rows for part in manifest.parts)]
        self._part = functools.lru_cache(MAX_MAPPED_PARTS)(self._mapped_part)

    def rows(self, start: int, stop: int) -> BlockRows:
        """Return the rows start ... stop - 1, which may lie in several blocks and parts."""
        if not 0 <= start < stop <= self.manifest.num_rows:
            raise IndexError(f"rows [{start}, {stop}) of {self.manifest.num_rows:,} rows")
        pieces = [*self._pieces(start, stop)]
        ids = np.concatenate([part.ids[block, :, rows] for part, block, rows in pieces], axis=1)
        labels = np.concatenate([part.labels[block, rows] for part, block, rows in pieces])
        lengths = np.concatenate(
            [part.lengths[block, :, rows] for part, block, rows in pieces], axis=1
        )
        values = np.zeros(0, np.int32)
        if len(lengths):
            by_feature = zip(*(piece.lists() for piece in pieces), strict=True)
            values = np.concatenate([*itertools.chain(*by_feature)])
        dense = np.concatenate([part.dense[block, rows] for part, block, rows in pieces])
        return BlockRows(dense, labels.astype(np.float32), ids, lengths, values)

    def _pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """Yield the rows start ... stop - 1, block by block."""
        block_rows = self.manifest.block_rows
        while start < stop:
            number = bisect.bisect_right(self._part_starts, start) - 1
            part_start, part_stop = self._part_starts[number : number + 2]
            block, first = divmod(start - part_start, block_rows)
            num_rows = min(block_rows - first, min(stop, part_stop) - start)
            yield _Piece(self._part(number), block, slice(first, first + num_rows))
            start += num_rows

    def _mapped_part(self, number: int) -> _Part:
        part = self.manifest.parts[number]
        folder = self._folder / part.folder
        num_blocks = -(-part.num_rows // self.manifest.block_rows)
        shapes = self.manifest.layout.shapes(num_blocks, part.num_values)
        return _Part(
            *(
                _mapped(folder / name, shape) if name in part.file_bytes else np.zeros(shape, dtype)
                for (name, shape), dtype in zip(shapes.items(), DTYPES.values(), strict=True)
            )
        )


def _mapped(path: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the array in a file; only the pages that are read are loaded."""
    try:
        array = np.asarray(np.load(path, mmap_mode="r"))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); {CONVERT_AGAIN}") from error
    if (array.shape, array.dtype) != (shape, DTYPES[path.name]):
        raise DataError(
            f"{path} is damaged: it has {[*array.shape]} {array.dtype}, and must have "
            f"{[*shape]} {DTYPES[path.name]}; {CONVERT_AGAIN}"
        )
    return array
