"""MLPerf's multi-hot Criteo 1TB, read from the files of the DLRM-DCNv2 reference implementation.

`recommendation_v2/torchrec_dlrm` of mlcommons/training makes them: its script
`materialize_synthetic_multihot_dataset.py --copy_labels_and_dense` leaves for each of 24 days
    day_{i}_dense.npy             [N, 13] fp32, logarithms already
    day_{i}_labels.npy            [N, 1] int32
    day_{i}_sparse_multi_hot.npz  0.npy ... 25.npy, uncompressed: [N, K_f] int32
for N samples with K_f ids of feature f each. All days but the last are for training. The first half
of the last day is the reference's validation data, and the second half is its test data.

Differences from the reference: a global batch is one contiguous piece of the data, while there each
rank reads its own part of the data; and an incomplete last batch is always left out.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.criteo import CAT_FEATURE_COUNT, DAYS, INT_FEATURE_COUNT
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split, reuse_histogram, share_of_batch
from dlrm_sharded.datasets.presets import cap_rows, mlperf_dcnv2
from dlrm_sharded.files.errors import ConfigError, DataError, check_choice, check_count, check_path
from dlrm_sharded.plans.tables import Table

Arrays = list[NDArray[Any]]
"""Arrays of N rows: dense [N, 13], labels [N, 1], and the ids [N, K_f] of each feature f."""

FILES = {
    "dense.npy": np.dtype(np.float32),
    "labels.npy": np.dtype(np.int32),
    "sparse_multi_hot.npz": np.dtype(np.int32),
}
"""Suffixes of the names of a day's files, and the types of their values."""

MAX_HEADER_BYTES = 2**16 + 10
"""Largest header of a .npy file in format 1.0."""

MAKE_AGAIN = (
    "copy it again, or make it again with MLPerf's "
    "materialize_synthetic_multihot_dataset.py --copy_labels_and_dense"
)


class MultiHotCriteo:
    """Serves batches from the files of all days, which are mapped into memory.

    Args:
        path: folder of the files.
        embedding_dim: width of all 26 tables, whose rows are those of `presets.mlperf_dcnv2`.
        days: number of days; fewer than 24 for a part of the data.
        val_half: half of the last day that is the validation split, "first" or "second".
        max_rows: larger tables are cut to this, and ids are taken modulo the rows of their table,
            as the reference takes them modulo its `--num_embeddings_per_feature`.
    """

    num_dense = INT_FEATURE_COUNT

    def __init__(
        self,
        path: str | Path,
        *,
        batch_size: int,
        embedding_dim: int,
        days: int = DAYS,
        val_half: str = "first",
        max_rows: int | None = None,
    ) -> None:
        check_path("data.path", path)
        check_count("batch_size", batch_size, least=1)
        check_count("data.days", days, least=2, most=DAYS)
        check_choice("data.val_half", val_half, ("first", "second"))
        self.batch_size = batch_size
        self._folder, self._num_days, self._val_half = Path(path), days, val_half
        if max_rows is not None:
            check_count("data.max_rows", max_rows, least=1)
        self._is_cut = max_rows is not None
        self._unprofiled = cap_rows(mlperf_dcnv2(embedding_dim), max_rows)

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        """The 26 tables with the profile of the first global batch."""
        features = self.batch("train", 0, rank=0, world_size=1).sparse_features
        return tuple(
            dataclasses.replace(
                table,
                pooling_factor=self.ids_per_sample[table.name],
                reuse_histogram=reuse_histogram(features[table.name].values()),
            )
            for table in self._unprofiled
        )

    @property
    def ids_per_sample(self) -> dict[str, int]:
        _, _, *ids = self._days[0]
        return {t.name: one.shape[1] for t, one in zip(self._unprofiled, ids, strict=True)}

    def num_batches(self, split: Split) -> int:
        return len(self._rows(split)) // self.batch_size

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        first, num_samples = share_of_batch(self, split, index, rank=rank, world_size=world_size)
        days = list(self._read(self._rows(split)[first : first + num_samples]))
        dense, labels, *ids = zip(*days, strict=True)
        values = np.concatenate([day.reshape(-1) for feature in ids for day in feature])
        lengths = torch.tensor([*self.ids_per_sample.values()], dtype=torch.int32)
        num_ids = (lengths * num_samples).tolist()
        if self._is_cut:
            rows = [table.num_embeddings for table in self._unprofiled]
            values %= np.array(rows, np.int32).repeat(num_ids)
        return Batch(
            dense_features=torch.from_numpy(np.concatenate(dense)),
            sparse_features=KeyedJaggedTensor(
                keys=[table.name for table in self._unprofiled],
                values=torch.from_numpy(values),
                lengths=lengths.repeat_interleave(num_samples),
                stride=num_samples,
                length_per_key=num_ids,
            ),
            labels=torch.from_numpy(np.concatenate(labels).reshape(-1)).float(),
        )

    @functools.cached_property
    def _days(self) -> list[Arrays]:
        days = [_map_day(self._folder / f"day_{number}") for number in range(self._num_days)]
        for number, day in enumerate(days):
            widths, of_first = ([ids.shape[1] for ids in each[2:]] for each in (day, days[0]))
            if widths != of_first:
                raise DataError(
                    f"day_{number} has {widths} ids a sample by feature, day_0 {of_first}; "
                    f"{MAKE_AGAIN}"
                )
        num_train = sum(len(day[0]) for day in days[:-1])
        if num_train < self.batch_size:
            raise ConfigError(
                f"batch_size is {self.batch_size:,}, but {self._folder} has only {num_train:,} "
                "samples for training; lower batch_size"
            )
        return days

    def _rows(self, split: Split) -> range:
        """Return the row numbers of a split; rows are numbered through all days."""
        *train, last = (len(day[0]) for day in self._days)
        start, middle = sum(train), sum(train) + (last + 1) // 2
        if split == "train":
            return range(start)
        return range(start, middle) if self._val_half == "first" else range(middle, start + last)

    def _read(self, rows: range) -> Iterator[Arrays]:
        """Yield the part of these rows that lies in each day, without copying it."""
        start, stop = rows.start, rows.stop
        for day in self._days:
            if start < len(day[0]) and stop > 0:
                yield [array[max(start, 0) : stop] for array in day]
            start, stop = start - len(day[0]), stop - len(day[0])


def _map_day(name: Path) -> Arrays:
    """Return the arrays of a day whose files' names begin with `name`, mapped into memory.

    Raises:
        DataError: a file is missing, damaged or of another form.
    """
    day: Arrays = []
    widths = [INT_FEATURE_COUNT, 1]
    for kind, dtype in FILES.items():
        for array in _map_file(path := Path(f"{name}_{kind}")):
            columns = widths[len(day)] if len(day) < len(widths) else array.shape[1]
            shape = (len((day or [array])[0]), columns)
            if (array.shape, array.dtype) != (shape, dtype):
                raise DataError(
                    f"{path} has {[*array.shape]} {array.dtype} where the files beside it need "
                    f"{[*shape]} {dtype}; {MAKE_AGAIN}"
                )
            day.append(array)
    return day


def _map_file(path: Path) -> Arrays:
    """Return the array of a .npy file, or those of all features in an .npz file."""
    try:
        content = np.memmap(path, np.uint8, "r")
        if path.suffix == ".npy":
            return [_array(content)]
        with zipfile.ZipFile(path) as archive:
            members = [archive.getinfo(f"{i}.npy") for i in range(CAT_FEATURE_COUNT)]
        return [_array(_stored(content, member)) for member in members]
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; set data.path, or {MAKE_AGAIN}") from error
    except (OSError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as e:
        raise DataError(f"{path} cannot be read: {e}; {MAKE_AGAIN}") from e


def _stored(content: NDArray[np.uint8], member: zipfile.ZipInfo) -> NDArray[np.uint8]:
    """Return the bytes of an .npz file's member, which follow its header, name and extra field."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed, so that it cannot be mapped; write it with numpy.savez")
    sizes = content[member.header_offset + 26 : member.header_offset + 30].view("<u2")
    start = member.header_offset + 30 + int(sizes.sum())
    return content[start : start + member.file_size]


def _array(content: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the matrix in the bytes of a .npy file, without a copy."""
    header = io.BytesIO(content[:MAX_HEADER_BYTES].tobytes())
    np.lib.format.read_magic(header)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(header)
    if len(shape) != 2:
        raise ValueError(f"it has an array of the shape {[*shape]}, which is no matrix")
    values = content[header.tell() :].view(dtype)
    return values.reshape(shape, order="F" if is_fortran else "C")
