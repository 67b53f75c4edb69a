"""Files that a trained model is evaluated on, or whose rows it scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.blocks import PartManifest
from dlrm_sharded.datasets.conversion import (
    begin,
    blocks_manifest,
    discard,
    is_converted,
    noted_of,
    write_parts,
)
from dlrm_sharded.datasets.encoder import ColumnEncoder
from dlrm_sharded.datasets.good_rows import RowTally
from dlrm_sharded.datasets.schema import Schema
from dlrm_sharded.datasets.source_files import file_columns, find_files, read_pieces
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.plans.tables import Table

BLOCK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one rank in one batch of an evaluation.

    Args:
        first: number of the first row that is read; ranks read equally many.
        skip, count: of the read rows, those that count begin after `skip`, and are `count`.
    """

    first: int
    skip: int
    count: int


class HeldOutDataset(TableDataset):
    """All rows of files, as the encoder of a training encodes them, in their order.

    Args:
        encoder: of the training.
        dims: widths of the tables.
        folder: where the converted files are written.
        with_label: whether the files have labels, which are 0 otherwise.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        encoder: ColumnEncoder,
        dims: Mapping[str, int],
        folder: Path,
        *,
        batch_size: int,
        with_label: bool,
        max_malformed_share: float,
    ) -> None:
        super().__init__(
            files,
            encoder.schema.to_json(),
            batch_size=batch_size,
            blocks_dir=folder,
            max_malformed_share=max_malformed_share,
        )
        self._dims = dims
        self.paths = find_files("data.files", files)
        self._encoder = encoder
        self._with_label = with_label

    def convert(self, made_of: Mapping[str, object]) -> None:
        """Convert the files, unless it is done; one process calls it.

        After an error nothing is left.

        Args:
            made_of: what decides the result; what was made of something else is removed.
        """
        share = self._source.max_malformed_share
        files = [
            [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
            for path in self.paths
        ]
        made_of = {**made_of, "files": files, "label": self._with_label, "share": share}
        begin(self.blocks_dir, made_of)
        if is_converted(self.blocks_dir):
            return
        tallies = [RowTally(path, share) for path in self.paths]
        try:
            parts = write_parts(
                self._encoder, tallies, self.blocks_dir, BLOCK_ROWS, with_label=self._with_label
            )
            if not any(part.num_rows for part in parts):
                raise DataError(
                    f"{self.paths[0]} and the other files of data.files have no usable row"
                )
        except Exception:
            discard(self.blocks_dir)
            raise
        blocks_manifest(self._encoder, parts, 0, BLOCK_ROWS, made_of).save(self.blocks_dir)

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        return tuple(
            dataclasses.replace(table, embedding_dim=self._dims[table.name])
            for table in super().tables
        )

    @property
    def parts(self) -> tuple[PartManifest, ...]:
        return self._blocks.manifest.parts

    @property
    def num_rows(self) -> int:
        return self._blocks.manifest.num_rows

    @property
    def num_malformed(self) -> int:
        """Number of rows that are left out."""
        return sum(noted_of(part)["num_malformed"] for part in self.parts)

    def num_batches(self, split: Split) -> int:
        return 0

    def windows(self, first: int, *, rank: int, world_size: int) -> Iterator[Window]:
        """Yield the windows of a rank over the rows from `first` on, batch by batch."""
        size = min(self.batch_size // world_size, self.num_rows)
        for start in range(first + rank * size, self.num_rows + rank * size, world_size * size):
            read = min(start, self.num_rows - size)
            count = min(max(self.num_rows - start, 0), size)
            yield Window(read, min(start - read, size), count)

    def read(self, window: Window, *, world_size: int) -> Batch:
        """Return the rows of a window, with those that do not count."""
        size = min(self.batch_size // world_size, self.num_rows)
        return self._new_batch(self._blocks.rows(window.first, window.first + size))

    def unseen_shares(self) -> dict[str, float]:
        """Return the share of ids that are rare or unseen in the training, by column."""
        rare: dict[str, int] = {}
        ids: dict[str, int] = {}
        for part in self.parts:
            for name, count in noted_of(part)["num_rare"].items():
                rare[name] = rare.get(name, 0) + count
                ids[name] = ids.get(name, 0) + noted_of(part)["num_ids"][name]
        return {name: count / max(1, ids[name]) for name, count in rare.items()}

    def keys(self, number: int) -> pl.DataFrame:
        """Return what names the rows of a part: the schema's key columns, or else file and row.

        The part has rows.
        """
        path, schema = self.paths[number], self.schema
        rows = np.concatenate([np.arange(*r) for r in noted_of(self.parts[number])["row_numbers"]])
        if not schema.key:
            return pl.DataFrame({"row": rows}).select(pl.lit(str(path)).alias("file"), "row")
        pieces = [*read_pieces(path, schema, schema.key)]
        numbers = np.concatenate([piece.numbers for piece in pieces])
        return pl.concat([piece.frame for piece in pieces])[np.searchsorted(numbers, rows)]

    @functools.cached_property
    def _blocks(self) -> BlockReader:
        return BlockReader(self.blocks_dir)

    def _row_range(self, split: Split) -> tuple[int, int]:
        return 0, self.num_rows


def has_label(schema: Schema, paths: Sequence[Path], *, key: Sequence[str]) -> bool:
    """Return whether files have labels: all of them, or none.

    Raises:
        DataError: some do, or a file lacks a column of the key.
    """
    columns = {path: file_columns(path, schema) for path in paths}
    for path, found in columns.items():
        if missing := [name for name in key if name not in found]:
            raise DataError(f"{path} has no column {missing[0]!r}, a key that the scores repeat")
    without = [path for path, found in columns.items() if schema.label not in found]
    if 0 < len(without) < len(columns):
        raise DataError(
            f"{without[0]} has no label {schema.label!r}, and other files have it; evaluate those "
            "with labels alone"
        )
    return not without
