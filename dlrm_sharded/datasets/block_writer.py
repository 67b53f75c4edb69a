"""Writes parts of a folder of blocks; `blocks.py` describes the format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dlrm_sharded.datasets.blocks import DTYPES, MANIFEST, Layout, PartManifest, check_sizes
from dlrm_sharded.datasets.encoder import EncodedRows
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import sync_folder, write_durably
from dlrm_sharded.files.json_forms import read_form


def complete_part(folder: Path, number: int) -> PartManifest | None:
    """Return the manifest of a part that was written completely and is not damaged, or None."""
    name = f"part-{number:05}"
    try:
        fields = json.loads((folder / name / MANIFEST).read_bytes())
        part = read_form(fields, PartManifest, name=name)
        check_sizes(folder, part)
    except (DataError, OSError, RecursionError, ValueError):
        return None
    return part if part.folder == name else None


class PartWriter:
    """Writes one part of a folder of blocks.

    It is a context manager. The part is written to `part-<number>.partial`, which `finish` renames;
    without `finish`, nothing is left of it. An existing part with this number is replaced.

    Raises:
        OSError: the part cannot be written.
    """

    def __init__(self, folder: Path, number: int, layout: Layout) -> None:
        self._final = folder / f"part-{number:05}"
        self._partial = self._final.with_name(f"{self._final.name}.partial")
        shutil.rmtree(self._partial, ignore_errors=True)  # of a killed process
        self._partial.mkdir(parents=True)
        self._layout = layout
        shapes = layout.shapes(0, 0)
        self._files = {name: _NpyFile(self._partial / name, shapes[name]) for name in layout.files}
        self._ids = np.zeros(shapes["ids.npy"][1:], np.int32)
        self._lengths = np.zeros(shapes["lengths.npy"][1:], np.int32)
        self._lists: list[list[npt.NDArray[np.int32]]] = [[] for _ in self._lengths]
        self._shortest = np.full(layout.num_lists, np.iinfo(np.int32).max)
        self._longest = np.zeros(layout.num_lists, np.int64)
        self._num_rows = self._num_values = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.file.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def append(self, samples: EncodedRows) -> None:
        """Append samples."""
        dense, labels = samples.dense, samples.labels
        ids, lengths, values = samples.ids, samples.lengths, samples.values
        num_new, layout = len(labels), self._layout
        assert dense.shape == (num_new, layout.num_dense)
        assert ids.shape == (layout.num_single, num_new)
        assert lengths.shape == (layout.num_lists, num_new)
        offsets = np.zeros((layout.num_lists, num_new + 1), np.int64)
        np.cumsum(lengths, axis=1, out=offsets[:, 1:])
        assert [len(feature) for feature in values] == offsets[:, -1].tolist()
        self._files["dense.npy"].append(dense)
        self._files["labels.npy"].append(labels)
        np.minimum(self._shortest, lengths.min(axis=1, initial=2**31 - 1), out=self._shortest)
        np.maximum(self._longest, lengths.max(axis=1, initial=0), out=self._longest)
        start = 0
        while start < num_new:
            filled = self._num_rows % layout.block_rows
            stop = min(start + layout.block_rows - filled, num_new)
            rows = slice(filled, filled + stop - start)
            self._ids[:, rows] = ids[:, start:stop]
            self._lengths[:, rows] = lengths[:, start:stop]
            for lists, feature, bounds in zip(self._lists, values, offsets, strict=True):
                lists.append(feature[bounds[start] : bounds[stop]].astype(np.int32))
            self._num_rows += stop - start
            start = stop
            if self._num_rows % layout.block_rows == 0:
                self._write_block()

    def finish(self, origin: Mapping[str, Any]) -> PartManifest:
        """Pad the last block, complete the files, and give the part its final name, durably.

        Args:
            origin: see `PartManifest.facts`.
        """
        if padding := -self._num_rows % self._layout.block_rows:
            self._files["dense.npy"].append(np.zeros((padding, self._layout.num_dense)))
            self._files["labels.npy"].append(np.zeros(padding))
            self._write_block()
        num_blocks = (self._num_rows + padding) // self._layout.block_rows
        shapes = self._layout.shapes(num_blocks, self._num_values)
        # Without rows, there is no shortest list.
        shortest = np.minimum(self._shortest, self._longest).tolist()
        part = PartManifest(
            folder=self._final.name,
            num_rows=self._num_rows,
            file_bytes={name: file.finish(shapes[name]) for name, file in self._files.items()},
            num_values=self._num_values,
            list_lengths=tuple(zip(shortest, self._longest.tolist(), strict=True)),
            facts=origin,
        )
        text = json.dumps(asdict(part), indent=1) + "\n"
        write_durably(self._partial / MANIFEST, [text.encode()])
        sync_folder(self._partial)
        if self._final.exists():
            shutil.rmtree(self._final)
        self._partial.rename(self._final)
        sync_folder(self._final.parent)
        return part

    def _write_block(self) -> None:
        """Write the ids of the open block and begin a new one."""
        if self._layout.num_single:
            self._files["ids.npy"].append(self._ids)
        if self._layout.num_lists:
            counts = self._lengths.sum(axis=1)
            ends = self._num_values + counts.cumsum()
            self._files["lengths.npy"].append(self._lengths)
            self._files["starts.npy"].append(ends - counts)
            self._num_values = int(ends[-1])
        for lists in self._lists:
            for values in lists:
                self._files["values.npy"].append(values)
            lists.clear()
        self._ids[:] = 0
        self._lengths[:] = 0


class _NpyFile:
    """A .npy file that grows. numpy pads the header for the final number of blocks."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self._dtype = DTYPES[path.name]
        self.file = path.open("wb")
        self._write_header(shape)

    def append(self, values: npt.NDArray[Any]) -> None:
        self.file.write(np.ascontiguousarray(values, self._dtype).data)

    def finish(self, shape: tuple[int, ...]) -> int:
        """Write the final shape, close the file when it is on disk, and return its size."""
        size_bytes = self.file.tell()
        self.file.seek(0)
        self._write_header(shape)
        assert size_bytes - self.file.tell() == np.prod(shape) * self._dtype.itemsize
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return size_bytes

    def _write_header(self, shape: tuple[int, ...]) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)
