"""Stores samples on disk in blocks, as plain .npy files that are mapped into memory.

A folder holds, for B = `block_rows` samples per block, F features and N blocks:
    ids.npy        [N, F, B] int32, feature-major, so that one block is the values of one KJT
    dense.npy      [N, B, num_dense] fp32
    labels.npy     [N, B] uint8
    manifest.json  sizes of all files, number of training rows, source; written last
The last block is padded with zeros. Rows are numbered through all blocks: the first
`num_train_rows` are for training, the rest for validation. A folder without a manifest is not
complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import read_file, replace_file
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Count, PositiveInt, Text

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {
    "ids.npy": np.dtype(np.int32),
    "dense.npy": np.dtype(np.float32),
    "labels.npy": np.dtype(np.uint8),
}
"""Names of the files, and the types of their values."""

HEADER_FAULTS = (ArithmeticError, EOFError, MemoryError, RecursionError, SyntaxError, TokenError)
"""Errors that numpy raises for a damaged header, which it reads as Python's literals."""

CONVERT_AGAIN = "remove the folder and convert again"


@dataclass(frozen=True, slots=True)
class BlocksManifest:
    """Describes a folder of blocks.

    Args:
        num_rows: number of samples, without the padding; the first `num_train_rows` train.
        file_bytes: the size of each file of the folder.
        source: description of how the folder was made, in any form.
    """

    num_rows: PositiveInt
    num_train_rows: Count
    block_rows: PositiveInt
    num_dense: PositiveInt
    feature_names: tuple[Text, ...]
    num_embeddings: tuple[PositiveInt, ...]
    file_bytes: Mapping[str, PositiveInt]
    source: Mapping[str, Any]

    def __post_init__(self) -> None:
        names = self.feature_names
        if not names or len(set(names)) < len(names) or len(names) != len(self.num_embeddings):
            raise ValueError(f"{len(names)} features for {len(self.num_embeddings)} tables")
        if self.num_train_rows > self.num_rows:
            raise ValueError(f"{self.num_train_rows} training rows of {self.num_rows}")
        if missing := DTYPES.keys() - self.file_bytes:
            raise ValueError(f"the sizes of {sorted(missing)} are not there")

    def save(self, folder: Path) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1)
        replace_file(folder / MANIFEST, (text + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> BlocksManifest:
        path = folder / MANIFEST
        damaged = f"{path} is damaged, so {CONVERT_AGAIN}"
        try:
            fields = json.loads(read_file(path))
            version = fields.pop("format_version")
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{folder} is not a folder of blocks: it has no {MANIFEST}, which a "
                "conversion writes last: convert again, or correct the path"
            ) from None
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
            raise DataError(f"{damaged}: {e!r}") from e
        if version != FORMAT_VERSION:
            raise DataError(
                f"{folder} has block format {version}, this release reads format "
                f"{FORMAT_VERSION}; {CONVERT_AGAIN}"
            )
        return read_form(fields, cls, name=damaged)

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be padded."""
        return -(-self.num_rows // self.block_rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the array in a file."""
        shapes = block_shapes(len(self.feature_names), self.block_rows, self.num_dense)
        return (self.num_blocks, *shapes[name])


def block_shapes(num_features: int, block_rows: int, num_dense: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of a block in each file."""
    return {
        "ids.npy": (num_features, block_rows),
        "dense.npy": (block_rows, num_dense),
        "labels.npy": (block_rows,),
    }


class BlockWriter:
    """Writes a folder of blocks. Samples and their ids are appended separately, in row order.

    It is a context manager that closes the files; the folder is complete only after `finish`.
    """

    def __init__(
        self, folder: Path, *, num_dense: int, feature_names: tuple[str, ...], block_rows: int
    ) -> None:
        self._folder = folder
        self._num_dense = num_dense
        self._feature_names = feature_names
        self._block_rows = block_rows
        shapes = block_shapes(len(feature_names), block_rows, num_dense)
        self._files = [_NpyFile(folder / name, DTYPES[name], shapes[name]) for name in shapes]
        self._ids, self._dense, self._labels = self._files
        self._open_block = np.zeros(shapes["ids.npy"], np.int32)
        self._num_id_rows = 0
        self._num_rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.file.close()

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def append_samples(self, *, dense: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
        """Append dense [n, num_dense] and labels [n]."""
        assert dense.shape == (len(labels), self._num_dense)
        self._dense.append(dense)
        self._labels.append(labels)
        self._num_rows += len(labels)

    def append_ids(self, ids: npt.NDArray[Any]) -> None:
        """Append the ids [F, n] of the next n samples."""
        start, num_new = 0, ids.shape[1]
        while start < num_new:
            filled = self._num_id_rows % self._block_rows
            taken = min(self._block_rows - filled, num_new - start)
            self._open_block[:, filled : filled + taken] = ids[:, start : start + taken]
            self._num_id_rows += taken
            start += taken
            if filled + taken == self._block_rows:
                self._ids.append(self._open_block)
                self._open_block[:] = 0

    def finish(
        self, *, num_train_rows: int, num_embeddings: tuple[int, ...], source: Mapping[str, Any]
    ) -> BlocksManifest:
        """Pad the last block, complete the files and write the manifest."""
        assert self._num_id_rows == self._num_rows >= num_train_rows
        padding = -self._num_rows % self._block_rows
        if padding:
            self._ids.append(self._open_block)
            self._dense.append(np.zeros((padding, self._num_dense)))
            self._labels.append(np.zeros(padding))
        num_blocks = (self._num_rows + padding) // self._block_rows
        manifest = BlocksManifest(
            num_rows=self._num_rows,
            num_train_rows=num_train_rows,
            block_rows=self._block_rows,
            num_dense=self._num_dense,
            feature_names=self._feature_names,
            num_embeddings=num_embeddings,
            file_bytes={file.path.name: file.finish(num_blocks) for file in self._files},
            source=source,
        )
        manifest.save(self._folder)
        return manifest


class _NpyFile:
    """A .npy file that grows. numpy leaves room in the header for the final number of blocks."""

    def __init__(self, path: Path, dtype: np.dtype[Any], block_shape: tuple[int, ...]) -> None:
        self.path = path
        self._dtype = dtype
        self._block_shape = block_shape
        self.file = path.open("wb")
        self._write_header(0)

    def append(self, values: npt.NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(values, self._dtype).data)

    def finish(self, num_blocks: int) -> int:
        """Write the final number of blocks, close the file, and return its size."""
        size_bytes = self.file.tell()
        self.file.seek(0)
        self._write_header(num_blocks)
        assert size_bytes - self.file.tell() == (
            num_blocks * int(np.prod(self._block_shape)) * self._dtype.itemsize
        )
        self.file.close()
        return size_bytes

    def _write_header(self, num_blocks: int) -> None:
        np.lib.format.write_array_header_1_0(
            self.file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (num_blocks, *self._block_shape),
            },
        )


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Copies of n rows: dense [n, num_dense] fp32, ids [F, n] int32, labels [n] fp32."""

    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.float32]


class BlockReader:
    """Reads rows of a folder of blocks; only the memory pages of these rows are loaded.

    Raises:
        DataError: the folder is not complete, or a file does not have the size it was written with.
    """

    def __init__(self, folder: Path) -> None:
        self.manifest = BlocksManifest.load(folder)
        self._folder = folder
        for name in DTYPES:
            _check_size(folder / name, self.manifest.file_bytes[name])
        arrays = {name: self._mapped(name) for name in DTYPES}
        self._ids = arrays["ids.npy"]
        self._dense = arrays["dense.npy"].reshape(-1, self.manifest.num_dense)
        self._labels = arrays["labels.npy"].reshape(-1)
        self._num_embeddings = np.array(self.manifest.num_embeddings)

    def rows(self, start: int, stop: int) -> BlockRows:
        """Return the rows start ... stop - 1, which may lie in several blocks."""
        if not 0 <= start < stop <= self.manifest.num_rows:
            raise IndexError(f"rows [{start}, {stop}) of {self.manifest.num_rows:,} rows")
        ids, labels = self._copy_ids(start, stop), self._labels[start:stop]
        # As unsigned numbers, negative ids are too large, so that one comparison finds both.
        if (ids.view(np.uint32).max(axis=1) >= self._num_embeddings).any() or labels.max() > 1:
            raise DataError(
                f"{self._folder} has ids that are no rows of their table, or labels that are "
                f"neither 0 nor 1, in the rows {start:,} to {stop - 1:,}: it is damaged; "
                f"{CONVERT_AGAIN}"
            )
        return BlockRows(
            dense=np.array(self._dense[start:stop]), ids=ids, labels=labels.astype(np.float32)
        )

    def _mapped(self, name: str) -> npt.NDArray[Any]:
        """Return the array in a file; only the pages that are read are loaded."""
        path = self._folder / name
        try:
            array = np.asarray(np.load(path, mmap_mode="r"))
        except (*HEADER_FAULTS, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}); {CONVERT_AGAIN}") from error
        expected = self.manifest.shape(name)
        if (array.shape, array.dtype) != (expected, DTYPES[name]):
            raise DataError(
                f"{path} is damaged: it has {[*array.shape]} {array.dtype}, and must have "
                f"{[*expected]} {DTYPES[name]}; {CONVERT_AGAIN}"
            )
        return array

    def _copy_ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        block, offset = divmod(start, self.manifest.block_rows)
        ids = np.empty((len(self.manifest.feature_names), stop - start), np.int32)
        filled = 0
        while filled < stop - start:
            part = self._ids[block, :, offset : offset + stop - start - filled]
            ids[:, filled : filled + part.shape[1]] = part
            filled += part.shape[1]
            block, offset = block + 1, 0
        return ids


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise DataError(
            f"{path} should have {expected:,} B, but has {size:,} B: it was truncated or replaced "
            f"after the conversion; {CONVERT_AGAIN}"
        )
