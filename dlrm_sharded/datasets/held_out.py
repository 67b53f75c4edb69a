"""Files that a trained model is evaluated on, or whose rows it scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.blocks import PartManifest
from dlrm_sharded.datasets.conversion import (
    begin,
    blocks_manifest,
    facts,
    is_converted,
    write_parts,
)
from dlrm_sharded.datasets.encoder import ColumnEncoder
from dlrm_sharded.datasets.good_rows import RowTally
from dlrm_sharded.datasets.schema import Schema
from dlrm_sharded.datasets.source_files import file_columns, find_files, read_pieces
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.datasets.table_source import names_and_sizes
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
        super().__init__(files, encoder.schema.to_json(), batch_size=batch_size, blocks_dir=folder)
        self._dims = dims
        self.paths = find_files("data.files", files)
        self._encoder = encoder
        self._with_label = with_label
        self._max_share = max_malformed_share

    def convert(self, made_of: Mapping[str, object]) -> None:
        """Convert the files, unless it is done; one process calls it.

        Args:
            made_of: what decides the result; what was made of something else is removed.
        """
        made_of = {**made_of, "files": names_and_sizes(self.paths), "label": self._with_label}
        begin(self.blocks_dir, made_of)
        if is_converted(self.blocks_dir):
            return
        parts = write_parts(
            self._encoder,
            [RowTally(path, self._max_share) for path in self.paths],
            self.blocks_dir,
            BLOCK_ROWS,
            with_label=self._with_label,
        )
        manifest = blocks_manifest(self._encoder, parts, 0, BLOCK_ROWS, made_of)
        if not manifest.num_rows:
            raise DataError(f"{self.paths[0]} and the other files of data.files have no usable row")
        manifest.save(self.blocks_dir)

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
            for name, count in facts(part)["num_rare"].items():
                rare[name] = rare.get(name, 0) + count
                ids[name] = ids.get(name, 0) + facts(part)["num_ids"][name]
        return {name: count / max(1, ids[name]) for name, count in rare.items()}

    def keys(self, number: int) -> pl.DataFrame:
        """Return what names the rows of a part: the schema's key columns, or else file and row."""
        path, schema = self.paths[number], self.schema
        ranges = [pl.arange(*r, eager=True) for r in facts(self.parts[number])["row_numbers"]]
        rows = pl.concat([pl.Series([], dtype=pl.Int64), *ranges]).alias("row")
        if not schema.key:
            return pl.DataFrame([rows]).select(pl.lit(path.name).alias("file"), "row")
        frames = [
            piece.frame.with_columns(row=piece.numbers)
            for piece in read_pieces(path, schema, schema.key)
        ]
        joined = pl.DataFrame([rows]).join(pl.concat(frames), on="row", how="left")
        return joined.select(schema.key)

    @functools.cached_property
    def _blocks(self) -> BlockReader:
        return BlockReader(self.blocks_dir)

    def _row_range(self, split: Split) -> tuple[int, int]:
        return 0, self.num_rows


def has_label(schema: Schema, paths: Sequence[Path]) -> bool:
    """Return whether files have labels: all of them, or none.

    Raises:
        DataError: some do.
    """
    found = {schema.label in file_columns(path, schema) for path in paths}
    if len(found) > 1:
        raise DataError(f"some of the files have the label {schema.label!r}, and some have not")
    return found.pop()
