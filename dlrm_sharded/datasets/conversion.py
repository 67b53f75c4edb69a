"""Converts users' files to blocks, in memory that does not grow with the rows.

The files of the training are read twice: once for the vocabularies and figures that the schema asks
for, and once to write the blocks. What is done for one file is kept in `<folder>.partial`, so that
a conversion that was killed goes on with the file that it was at.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_sharded.datasets.block_writer import PartWriter, complete_part
from dlrm_sharded.datasets.blocks import MANIFEST, BlocksManifest, Feature, Layout, PartManifest
from dlrm_sharded.datasets.build_once import build_once
from dlrm_sharded.datasets.encoder import FILE_NAME, ColumnEncoder, Figures, vocabulary_path
from dlrm_sharded.datasets.good_rows import RowTally, read_good_rows
from dlrm_sharded.datasets.table_source import TableSource, names_and_sizes
from dlrm_sharded.datasets.vocabulary import KeyCounts, Vocabulary, write_vocabulary
from dlrm_sharded.files.errors import DataError, UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.progress_bar import ProgressBar

log = logging.getLogger(__name__)

ENCODER_FOLDER = "encoder"
UNFINISHED = "unfinished.json"
"""File of a partial folder that says from what it is made."""


def is_converted(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def convert(source: TableSource, folder: Path) -> None:
    """Convert unless `folder` is complete already; a second process waits for the first.

    Raises:
        DataError: a file is missing, damaged or too malformed; nothing is left behind.
    """
    build_once(folder, is_complete=is_converted, build=lambda partial: _build(source, partial))


def _build(source: TableSource, folder: Path) -> None:
    train, validation = source.paths()
    log.info("converting %d files of columns", len(train) + len(validation))
    made_of = {
        "settings": source.settings(),
        "train_files": names_and_sizes(train),
        "validation_files": names_and_sizes(validation),
    }
    _begin(folder, made_of)
    stop = source.num_training_rows(train)
    encoder = _trained_encoder(source, train, stop, folder)
    parts = list(_write_parts(source, encoder, [*train, *validation], folder))
    if stop is None:
        num_train_rows = sum(part.num_rows for part in parts[: len(train)])
    else:
        num_train_rows = _rows_before(stop, parts)
    manifest = blocks_manifest(encoder, parts, num_train_rows, source.block_rows, made_of)
    if not num_train_rows:
        raise DataError(f"{train[0]} and the other files of the training have no usable row")
    manifest.save(folder)
    for path in (*folder.glob("counted-*.json"), *folder.glob("counts-*"), folder / UNFINISHED):
        path.unlink()
    log.info(
        "%s samples for training, %s for validation, %s malformed rows left out, %s table rows",
        f"{num_train_rows:,}",
        f"{manifest.num_rows - num_train_rows:,}",
        f"{sum(facts(part)['num_malformed'] for part in parts):,}",
        f"{sum(encoder.num_embeddings().values()):,}",
    )


def _begin(folder: Path, made_of: Mapping[str, Any]) -> None:
    """Keep what a killed conversion of the same files has left in a folder, and nothing else."""
    note = folder / UNFINISHED
    with contextlib.suppress(UserError):
        if read_json_object(note, noun="conversion") == made_of:
            log.info("going on with a conversion that was stopped")
            return
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_json(note, made_of)


def _trained_encoder(
    source: TableSource, train: Sequence[Path], stop: int | None, folder: Path
) -> ColumnEncoder:
    """Return the encoder of the training rows, which are read unless it is there already."""
    schema, place = source.schema, folder / ENCODER_FOLDER
    if (place / FILE_NAME).exists():
        return ColumnEncoder.load(place)
    place.mkdir(exist_ok=True)
    tables = [table for table in schema.tables().values() if table.ids == "vocabulary"]
    standardized = [name for name, column in schema.dense_columns.items() if column.standardize]
    moments = dict.fromkeys(standardized, Moments())
    if tables or standardized:
        first = 0
        with ProgressBar(unit="rows", desc="reading") as bar:
            for number, path in enumerate(train):
                if stop is not None and first >= stop:
                    break
                counted = _count_file(
                    source, path, number, None if stop is None else stop - first, folder, bar
                )
                first += counted["num_rows"]
                for name, found in counted["moments"].items():
                    moments[name] = moments[name].merged(Moments(*found))
    counts = sorted(folder.glob("counts-*.parquet"))
    for number, table in enumerate(ProgressBar(tables, desc="making vocabularies")):
        write_vocabulary(vocabulary_path(place, number), counts, number, table)
    encoder = ColumnEncoder(
        schema,
        {name: of.figures for name, of in moments.items()},
        {t.name: Vocabulary(vocabulary_path(place, number)) for number, t in enumerate(tables)},
    )
    encoder.save(place)
    return encoder


def _count_file(
    source: TableSource, path: Path, number: int, stop: int | None, folder: Path, bar: ProgressBar
) -> dict[str, Any]:
    """Count the keys of a file into `counts-*.parquet`; return its rows and moments.

    Args:
        stop: number of its rows that train; None for all.
    """
    done = folder / f"counted-{number:05}.json"
    if done.exists():
        return read_json_object(done, noun="count")
    for left in folder.glob(f"counts-{number:05}-*"):
        left.unlink()
    schema = source.schema
    tables = [table for table in schema.tables().values() if table.ids == "vocabulary"]
    counts = KeyCounts(folder, f"counts-{number:05}", len(tables))
    names = [name for name, column in schema.dense_columns.items() if column.standardize]
    moments = dict.fromkeys(names, Moments())
    tally = RowTally(path, source.max_malformed_share)
    columns = [name for name in schema.used_columns if name not in schema.key]
    for rows, _ in read_good_rows(schema, columns, tally, stop=stop, logs=False):
        for place, table in enumerate(tables):
            for name in table.columns:
                counts.add(place, rows.ids[name].ids)
        for name in names:
            moments[name] = moments[name].merged(Moments.of(rows.dense[name]))
        bar.update(len(rows.labels))
    counts.spill()
    fields = {
        "num_rows": tally.num_rows,
        "moments": {name: [of.count, of.mean, of.squares] for name, of in moments.items()},
    }
    write_json(done, fields)
    return fields


def _write_parts(
    source: TableSource, encoder: ColumnEncoder, paths: Sequence[Path], folder: Path
) -> Iterator[PartManifest]:
    with ProgressBar(unit="rows", desc="writing") as bar:
        for number, path in enumerate(paths):
            tally = RowTally(path, source.max_malformed_share)
            yield complete_part(folder, number) or write_part(
                encoder, tally, folder, number, source.block_rows, bar
            )


def write_part(
    encoder: ColumnEncoder,
    tally: RowTally,
    folder: Path,
    number: int,
    block_rows: int,
    bar: ProgressBar,
    *,
    with_label: bool = True,
) -> PartManifest:
    """Write the usable rows of a file as a part of a folder of blocks.

    The facts of the part are `num_read`, `num_malformed`, `num_rare` by column, and `row_numbers`,
    the ranges of numbers in the file, [begin, end), of its rows.
    """
    schema = encoder.schema
    columns = [name for name in schema.used_columns if name not in schema.key]
    if not with_label:
        columns.remove(schema.label)
    num_rare: dict[str, int] = {}
    num_ids: dict[str, int] = {}
    numbers = []
    with PartWriter(folder, number, layout_of(encoder, block_rows)) as writer:
        for rows, piece in read_good_rows(schema, columns, tally, with_label=with_label):
            found = encoder.encode(rows)
            writer.append(
                dense=found.dense,
                labels=found.labels,
                ids=found.ids,
                lengths=found.lengths,
                values=found.values,
            )
            numbers.append(piece.numbers)
            for name, count in found.num_rare.items():
                num_rare[name] = num_rare.get(name, 0) + count
                num_ids[name] = num_ids.get(name, 0) + len(rows.ids[name].ids)
            bar.update(len(found.labels))
        return writer.finish(
            {
                "num_read": tally.num_rows,
                "num_malformed": tally.num_malformed,
                "num_rare": num_rare,
                "num_ids": num_ids,
                "row_numbers": _ranges(numbers),
            }
        )


def layout_of(encoder: ColumnEncoder, block_rows: int) -> Layout:
    """Return the layout of blocks of encoded rows."""
    return Layout(
        num_dense=encoder.schema.num_dense,
        num_single=len(encoder.single),
        num_lists=len(encoder.lists),
        block_rows=block_rows,
    )


def blocks_manifest(
    encoder: ColumnEncoder,
    parts: Sequence[PartManifest],
    num_train_rows: int,
    block_rows: int,
    source: Mapping[str, Any],
) -> BlocksManifest:
    """Return the manifest of parts that an encoder has made."""
    rows = encoder.num_embeddings()
    table_of = {c: table.name for table in encoder.schema.tables().values() for c in table.columns}
    return BlocksManifest(
        features=tuple(
            Feature(name, rows[table_of[name]], is_list=name in encoder.lists)
            for name in (*encoder.single, *encoder.lists)
        ),
        num_dense=encoder.schema.num_dense,
        block_rows=block_rows,
        num_train_rows=num_train_rows,
        parts=tuple(parts),
        source=source,
    )


def facts(part: PartManifest) -> Mapping[str, Any]:
    """Return what `write_part` has noted of a part."""
    assert part.facts is not None
    return part.facts


def _ranges(numbers: Sequence[Any]) -> list[list[int]]:
    """Return the ranges [begin, end) of ascending numbers."""
    if not numbers:
        return []
    joined = np.concatenate(numbers)
    ends = np.flatnonzero(np.diff(joined) != 1)
    begins = joined[np.append(0, ends + 1)]
    return np.stack([begins, joined[np.append(ends, len(joined) - 1)] + 1], axis=1).tolist()


def _rows_before(stop: int, parts: Sequence[PartManifest]) -> int:
    """Return the number of usable rows among the first `stop` rows of the files of parts."""
    num_rows = 0
    for part in parts:
        for begin, end in facts(part)["row_numbers"]:
            num_rows += max(0, min(end, stop) - begin)
        stop -= facts(part)["num_read"]
    return num_rows


@dataclass(frozen=True, slots=True)
class Moments:
    """Number of values, their mean, and the sum of the squares of their distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Any) -> Moments:
        """Return the moments of values [n], of which nan are left out."""
        values = values[~np.isnan(values)]
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(len(values), mean, float(((values - mean) ** 2).sum()))

    def merged(self, other: Moments) -> Moments:
        """Return the moments of both sets of values (Chan et al., 1979)."""
        count = self.count + other.count
        if not count:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * other.count / count
        squares = self.squares + other.squares + distance**2 * self.count * other.count / count
        return Moments(count, mean, squares)

    @property
    def figures(self) -> Figures:
        return Figures(self.mean, (self.squares / self.count) ** 0.5 if self.count else 0.0)
