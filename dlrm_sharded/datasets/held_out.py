"""Files on which a trained model is evaluated, or whose rows it scores."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.blocks import PartManifest
from dlrm_sharded.datasets.conversion import begin, discard, is_converted, noted_of, write_blocks
from dlrm_sharded.datasets.encoder import ColumnEncoder
from dlrm_sharded.datasets.schema import Schema
from dlrm_sharded.datasets.source_files import file_columns, read_pieces
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.plans.tables import Table


class Window(NamedTuple):
    """The rows of one rank in one batch of an evaluation.

    Args:
        first, stop: the rows first ... stop - 1 are read, the same number on all ranks.
        skip: number of rows at the start that do not count, because another rank or batch has them.
    """

    first: int
    stop: int
    skip: int


class HeldOutDataset(TableDataset):
    """All rows of files in their order, encoded by the encoder of a training run.

    Args:
        encoder: encoder of the training run.
        dims: widths of the tables.
        folder: where the converted files are written.
        with_label: whether the files have labels; if not, labels are 0.
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
        self.paths, _ = self._source.paths()
        self._encoder = encoder
        self._with_label = with_label

    def convert(self, made_of: Mapping[str, object]) -> None:
        """Convert the files unless they are converted; one process calls this.

        After an error nothing is left.

        Args:
            made_of: what decides the result; a conversion of anything else is removed.
        """
        files = [
            [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
            for path in self.paths
        ]
        made_of = {**made_of, "files": files, "label": self._with_label}
        made_of["share"] = self._source.max_malformed_share
        begin(self.blocks_dir, made_of)
        if is_converted(self.blocks_dir):
            return
        try:
            write_blocks(
                self._encoder,
                self._source,
                self.paths,
                [None] * len(self.paths),
                self.blocks_dir,
                made_of,
                with_label=self._with_label,
            )
        except Exception:
            discard(self.blocks_dir)
            raise

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

    def windows(self, first: int, *, world_size: int) -> Iterator[list[Window]]:
        """Yield the windows of all ranks over the rows from `first` on, batch by batch."""
        size = min(self.batch_size // world_size, self.num_rows)
        for number in range(first, self.num_rows, world_size * size):
            starts = range(number, number + world_size * size, size)
            stops = [min(start + size, self.num_rows) for start in starts]
            yield [
                Window(stop - size, stop, skip=start + size - stop)
                for start, stop in zip(starts, stops, strict=True)
            ]

    def read(self, window: Window) -> Batch:
        """Return the rows of a window, including those that do not count."""
        return self._new_batch(self._blocks.rows(window.first, window.stop))

    def unseen_shares(self) -> dict[str, float]:
        """Return the share of ids that are rare or unseen in the training rows, by column."""
        rare: Counter[str] = Counter()
        ids: Counter[str] = Counter()
        for part in self.parts:
            rare.update(noted_of(part)["num_rare"])
            ids.update(noted_of(part)["num_ids"])
        return {name: rare[name] / max(1, count) for name, count in ids.items()}

    def keys(self, number: int) -> pl.DataFrame:
        """Return columns that identify a part's rows: the schema's key, or else file and row.

        The part must have rows.
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


def has_label(schema: Schema, paths: Sequence[Path], *, key: Sequence[str]) -> bool:
    """Return whether files have labels: all of them, or none.

    Raises:
        DataError: only some have labels, or a file lacks a column of the key.
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
