"""Converts users' files to blocks, in memory that does not grow with the number of rows.

Training files are read twice: once for the vocabularies and the means and deviations that the
schema asks for, and once to write the blocks. The result for each file is kept in
`<folder>.partial`, so that a killed conversion continues with the file at which it stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dlrm_sharded.datasets.block_writer import PartWriter, complete_part
from dlrm_sharded.datasets.blocks import MANIFEST, BlocksManifest, Feature, Layout, PartManifest
from dlrm_sharded.datasets.build_once import build_once
from dlrm_sharded.datasets.encoder import FILE_NAME, ColumnEncoder, Figures, vocabulary_path
from dlrm_sharded.datasets.good_rows import RowTally, read_good_rows
from dlrm_sharded.datasets.table_source import TableSource
from dlrm_sharded.datasets.vocabulary import KeyCounts, Vocabulary, write_vocabulary
from dlrm_sharded.files.errors import DataError, UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.progress_bar import ProgressBar

log = logging.getLogger(__name__)

T = TypeVar("T")

Advance = Callable[[int], None]
"""Called with the number of rows read since the last call."""

MAX_THREADS = 4
"""Number of files read in parallel; each takes up to 1 GiB of memory while ids are counted."""

ENCODER_FOLDER = "encoder"
UNFINISHED = "unfinished.json"
"""File of a partial folder that names the source of the conversion."""


def is_converted(folder: Path) -> bool:
    """Return whether a folder has all blocks of its files."""
    return (folder / MANIFEST).is_file()


def convert(source: TableSource, folder: Path) -> None:
    """Convert the files unless `folder` is complete; a second process waits for the first.

    Raises:
        DataError: a file is missing, damaged or too malformed; nothing is left behind.
    """
    build_once(folder, is_complete=is_converted, build=lambda partial: _build(source, partial))


def _build(source: TableSource, folder: Path) -> None:
    train, validation = source.paths()
    log.info("converting %d files of columns", len(train) + len(validation))
    made_of = source.described()
    begin(folder, made_of)
    num_training = source.training_rows(train)
    encoder = _trained_encoder(source, train, num_training, folder)
    manifest = write_blocks(encoder, source, (*train, *validation), num_training, folder, made_of)
    for path in (*folder.glob("counted-*.json"), *folder.glob("counts-*"), folder / UNFINISHED):
        path.unlink()
    log.info(
        "%s samples for training, %s for validation, %s malformed rows left out, %s table rows",
        f"{manifest.num_train_rows:,}",
        f"{manifest.num_rows - manifest.num_train_rows:,}",
        f"{sum(noted_of(part)['num_malformed'] for part in manifest.parts):,}",
        f"{sum(encoder.num_embeddings().values()):,}",
    )


def begin(folder: Path, made_of: Mapping[str, Any]) -> None:
    """Keep what a killed conversion of the same files left in a folder; empty any other folder."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / UNFINISHED
    with contextlib.suppress(UserError):
        if read_json_object(note, noun="conversion") == made_of:
            log.info("continuing a conversion that was stopped")
            for path in folder.rglob(".*.tmp"):  # half-written files
                path.unlink()
            return
    discard(folder)
    folder.mkdir()
    write_json(note, made_of)


def discard(folder: Path) -> None:
    """Remove a folder of `begin`; if this is killed, no conversion continues from what is left."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _trained_encoder(
    source: TableSource, train: Sequence[Path], num_training: Sequence[int | None], folder: Path
) -> ColumnEncoder:
    """Return the encoder of the training rows, which are read unless it exists already."""
    schema, place = source.schema, folder / ENCODER_FOLDER
    if (place / FILE_NAME).exists():
        return ColumnEncoder.load(place)
    place.mkdir(exist_ok=True)
    tables = [table for table in schema.tables().values() if table.ids == "vocabulary"]
    standardized = [name for name, column in schema.dense_columns.items() if column.standardize]
    moments = dict.fromkeys(standardized, Moments())
    if tables or standardized:
        for counted in _of_files(
            lambda number, path, advance: _count_file(
                source, path, number, num_training[number], folder, advance
            ),
            train,
            "reading",
        ):
            for name, found in counted.items():
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


def _of_files(work: Callable[[int, Path, Advance], T], paths: Sequence[Path], desc: str) -> list[T]:
    """Return the results of work on each file; threads process several files at once.

    After an error, the work on the other files ends when it next calls `advance`.
    """
    stopped = threading.Event()
    pool = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS))
    with ProgressBar(unit="rows", desc=desc) as bar:

        def advance(num_rows: int) -> None:
            if stopped.is_set():
                raise CancelledError
            bar.update(num_rows)

        futures = [pool.submit(work, number, path, advance) for number, path in enumerate(paths)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            return [future.result() for future in futures if future in done]
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


def _count_file(
    source: TableSource, path: Path, number: int, stop: int | None, folder: Path, advance: Advance
) -> dict[str, Any]:
    """Count the keys of a file into `counts-*.parquet`; return the moments of columns.

    Args:
        stop: number of the file's first rows that are for training; None for all.
    """
    done = folder / f"counted-{number:05}.json"
    if stop == 0:
        return {}
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
    for rows, _ in read_good_rows(schema, schema.used_columns, tally, stop=stop, logs=False):
        for place, table in enumerate(tables):
            for name in table.columns:
                counts.add(place, rows.ids[name].ids)
        for name in names:
            moments[name] = moments[name].merged(Moments.of(rows.dense[name]))
        advance(len(rows.labels))
    counts.spill()
    found = {name: [of.count, of.mean, of.squares] for name, of in moments.items()}
    write_json(done, found)
    return found


def write_blocks(
    encoder: ColumnEncoder,
    source: TableSource,
    paths: Sequence[Path],
    num_training: Sequence[int | None],
    folder: Path,
    made_of: Mapping[str, Any],
    *,
    with_label: bool = True,
) -> BlocksManifest:
    """Write the usable rows of each file as a part of a folder of blocks, unless it exists.

    The manifest of a part records `num_malformed`, by column `num_rare` and `num_ids` (the numbers
    of rare ids and of all ids), and `row_numbers`, the ranges [begin, end) of its rows in the file.

    Args:
        num_training: for each training file, how many of its first rows train; None for all.
        made_of: description of the blocks.

    Raises:
        DataError: there is no row for training, or a file is too malformed.
    """
    schema = encoder.schema
    columns = [name for name in schema.used_columns if with_label or name != schema.label]
    features = _features(encoder)
    layout = Layout.of(features, schema.num_dense, source.block_rows)

    def write_part(number: int, path: Path, advance: Advance) -> PartManifest:
        if (part := complete_part(folder, number)) is not None:
            return part
        tally = RowTally(path, source.max_malformed_share)
        num_rare: Counter[str] = Counter()
        num_ids: Counter[str] = Counter()
        numbers = []
        with PartWriter(folder, number, layout) as writer:
            for rows, piece in read_good_rows(schema, columns, tally, with_label=with_label):
                found = encoder.encode(rows)
                writer.append(found)
                numbers.append(piece.numbers)
                num_rare.update(found.num_rare)
                num_ids.update({name: len(rows.ids[name].ids) for name in found.num_rare})
                advance(len(found.labels))
            return writer.finish(
                {
                    "num_malformed": tally.num_malformed,
                    "num_rare": dict(num_rare),
                    "num_ids": dict(num_ids),
                    "row_numbers": _ranges(numbers),
                }
            )

    parts = _of_files(write_part, paths, "writing")
    num_train_rows = sum(
        part.num_rows if stop is None else _rows_before(stop, part)
        for part, stop in zip(parts, num_training, strict=False)
    )
    if not num_train_rows:
        raise DataError(f"{paths[0]} and the other files of data.files have no usable row")
    manifest = BlocksManifest(
        features=features,
        num_dense=layout.num_dense,
        block_rows=layout.block_rows,
        num_train_rows=num_train_rows,
        parts=tuple(parts),
        source=made_of,
    )
    manifest.save(folder)
    return manifest


def _features(encoder: ColumnEncoder) -> tuple[Feature, ...]:
    num_embeddings, tables = encoder.num_embeddings(), encoder.schema.tables().values()
    table_of = {column: table.name for table in tables for column in table.columns}
    return tuple(
        Feature(name, num_embeddings[table_of[name]], is_list=name in encoder.lists)
        for name in (*encoder.single, *encoder.lists)
    )


def noted_of(part: PartManifest) -> Mapping[str, Any]:
    """Return what `write_blocks` recorded in the manifest of a part."""
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


def _rows_before(stop: int, part: PartManifest) -> int:
    """Return the number of usable rows among the first `stop` rows of the file of a part."""
    ranges = noted_of(part)["row_numbers"]
    return sum(max(0, min(end, stop) - begin) for begin, end in ranges)


@dataclass(frozen=True, slots=True)
class Moments:
    """Number of values, their mean, and the sum of the squares of their distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Any) -> Moments:
        """Return the moments of values [n] that are not nan."""
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
