"""Reads rows of a folder of blocks in the format of `blocks.py`; files are memory-mapped."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dlrm_sharded.datasets.blocks import CONVERT_AGAIN, DTYPES, BlocksManifest, check_sizes
from dlrm_sharded.files.errors import DataError

MAX_MAPPED_PARTS = 32
"""Number of parts whose files stay mapped; each of a part's up to 6 files takes a descriptor."""

HEADER_FAULTS = (ArithmeticError, EOFError, MemoryError, RecursionError, SyntaxError, TokenError)
"""Errors that numpy raises for a damaged header, which it reads as a Python literal."""


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
    """Memory-mapped arrays of a part; empty ones stand for files that it does not have.

    `bounds` [N * F2 + 1] is `starts.npy`, flattened, followed by the end of the last list.
    """

    folder: Path
    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.uint8]
    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]
    values: npt.NDArray[np.int32]


class _Piece(NamedTuple):
    """Rows of a block."""

    part: _Part
    block: int
    rows: slice

    def lists(self) -> list[npt.NDArray[np.int32]]:
        """Return the ids of the lists, by feature.

        Raises:
            DataError: the lengths of the lists do not add up to the number of ids.
        """
        part, block, rows = self
        _, num_lists, block_rows = part.lengths.shape
        bounds = part.bounds[block * num_lists : (block + 1) * num_lists + 1]
        lengths = part.lengths[block, :, : rows.stop]
        first = bounds[:-1] + lengths[:, : rows.start].sum(axis=1)
        last = first + lengths[:, rows].sum(axis=1)
        wrong = last != bounds[1:] if rows.stop == block_rows else last > bounds[1:]
        if wrong.any() or lengths.min() < 0:
            raise DataError(
                f"{part.folder} is damaged: the lengths of lists in block {block:,} do not add up "
                f"to the number of their ids; {CONVERT_AGAIN}"
            )
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
        self._num_embeddings = np.array([f.num_embeddings for f in manifest.features])

    def rows(self, start: int, stop: int) -> BlockRows:
        """Return the rows start ... stop - 1, which may lie in several blocks and parts.

        Raises:
            DataError: a file is damaged.
        """
        if not 0 <= start < stop <= self.manifest.num_rows:
            raise IndexError(f"rows [{start}, {stop}) of {self.manifest.num_rows:,} rows")
        pieces = [*self._pieces(start, stop)]
        ids = np.concatenate([part.ids[block, :, rows] for part, block, rows in pieces], axis=1)
        labels = np.concatenate([part.labels[block, rows] for part, block, rows in pieces])
        lengths = np.zeros((self.manifest.layout.num_lists, stop - start), np.int32)
        values = np.zeros(0, np.int32)
        # As unsigned numbers, negative ids are too large, so one comparison finds both.
        largest = ids.view(np.uint32).max(axis=1)
        if len(lengths):
            lengths, values, of_lists = _lists(pieces)
            largest = np.append(largest, of_lists)
        if (largest >= self._num_embeddings).any() or labels.max() > 1:
            raise DataError(
                f"{self._folder} has ids that are no rows of their table, or labels that are "
                f"neither 0 nor 1, in the rows {start:,} to {stop - 1:,}: it is damaged; "
                f"{CONVERT_AGAIN}"
            )
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
        dense, labels, ids, lengths, starts, values = (
            _mapped(folder / name, shape) if name in part.file_bytes else np.zeros(shape, dtype)
            for (name, shape), dtype in zip(shapes.items(), DTYPES.values(), strict=True)
        )
        bounds = np.append(starts, part.num_values)
        if bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise DataError(f"{folder / 'starts.npy'} is damaged; {CONVERT_AGAIN}")
        return _Part(folder, dense, labels, ids, lengths, bounds, values)


def _lists(
    pieces: Sequence[_Piece],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    """Return the lengths, the ids, and the largest id by feature as an unsigned number."""
    lengths = np.concatenate([part.lengths[block, :, rows] for part, block, rows in pieces], axis=1)
    by_feature = [*zip(*(piece.lists() for piece in pieces), strict=True)]
    values = np.concatenate([*itertools.chain(*by_feature)])
    counts = np.array([sum(map(len, lists)) for lists in by_feature])
    has_any = counts > 0  # reduceat gives the next id where there is none
    starts = (counts.cumsum() - counts)[has_any]
    largest = np.zeros(len(counts), np.uint32)
    largest[has_any] = np.maximum.reduceat(values.view(np.uint32), starts)
    return lengths, values, largest


def _mapped(path: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the array in a file; only the pages that are read are loaded."""
    try:
        array = np.asarray(np.load(path, mmap_mode="r"))
    except (*HEADER_FAULTS, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); {CONVERT_AGAIN}") from error
    if (array.shape, array.dtype) != (shape, DTYPES[path.name]):
        raise DataError(
            f"{path} is damaged: it has {[*array.shape]} {array.dtype}, and must have "
            f"{[*shape]} {DTYPES[path.name]}; {CONVERT_AGAIN}"
        )
    return array
