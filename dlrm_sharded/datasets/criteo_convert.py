"""Converts Criteo TSVs to a folder of sample blocks, in memory that does not grow with the rows.

With a vocabulary the conversion reads the text once and writes raw ids to one file per column,
counts the ids of the training rows column by column, and then maps all raw ids. The files of raw
ids need 104 B of disk per row until the end. With hashing, ids are mapped while reading.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, INT_FEATURE_COUNT

from dlrm_sharded.datasets.blocks import MANIFEST, BlockWriter
from dlrm_sharded.datasets.build_once import build_once
from dlrm_sharded.datasets.criteo_source import CriteoSource, names_and_sizes
from dlrm_sharded.datasets.criteo_tsv import CriteoTsv
from dlrm_sharded.datasets.vocabulary import IdCounter, RawIds, Vocabulary
from dlrm_sharded.files.progress_bar import ProgressBar

log = logging.getLogger(__name__)

PIECE_ROWS = 1 << 16
"""Number of raw ids that are read from a column's file at once."""


def is_converted(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def convert(source: CriteoSource, blocks_dir: Path) -> None:
    """Convert unless `blocks_dir` is complete already; a second process waits for the first.

    Raises:
        DataError: a file is missing, damaged, empty or too malformed; nothing is left behind.
    """
    build_once(blocks_dir, is_complete=is_converted, build=lambda folder: _build(source, folder))


def _build(source: CriteoSource, folder: Path) -> None:
    train_paths, val_paths = source.paths()
    log.info("converting %d Criteo files", len(train_paths) + len(val_paths))
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(
            BlockWriter(
                folder,
                num_dense=INT_FEATURE_COUNT,
                feature_names=tuple(DEFAULT_CAT_NAMES),
                block_rows=source.block_rows,
            )
        )
        ids: HashedIds | VocabularyIds
        if source.id_mapping == "vocabulary":
            columns = VocabularyIds(folder, caps=source.caps, min_count=source.min_count)
            ids = stack.enter_context(columns)
        else:
            assert source.caps is not None, "checked by CriteoSource"
            ids = HashedIds(source.caps)
        tsvs = _read([*train_paths, *val_paths], source, writer, ids)
        if val_paths:
            num_train_rows = sum(tsv.num_samples for tsv in tsvs[: len(train_paths)])
        else:
            num_val_rows = math.floor(writer.num_rows * source.val_share + 1e-6)
            num_train_rows = writer.num_rows - num_val_rows
        num_embeddings = ids.finish(writer, num_train_rows)
        manifest = writer.finish(
            num_train_rows=num_train_rows,
            num_embeddings=num_embeddings,
            source={
                "settings": source.settings(),
                "train_files": names_and_sizes(train_paths),
                "val_files": names_and_sizes(val_paths),
                "num_malformed": [tsv.num_malformed for tsv in tsvs],
            },
        )
    log.info(
        "%s samples for training, %s for validation, %s malformed lines left out, %s table rows",
        f"{num_train_rows:,}",
        f"{manifest.num_rows - num_train_rows:,}",
        f"{sum(tsv.num_malformed for tsv in tsvs):,}",
        f"{sum(num_embeddings):,}",
    )


def _read(
    paths: list[Path], source: CriteoSource, writer: BlockWriter, ids: HashedIds | VocabularyIds
) -> list[CriteoTsv]:
    """Read all files and return them with their final counts."""
    tsvs = []
    size_bytes = sum(path.stat().st_size for path in paths)
    with ProgressBar(total=size_bytes, unit="B", unit_scale=True, desc="reading") as bar:
        for path in paths:
            tsv = CriteoTsv(
                path, max_malformed_share=source.max_malformed_share, on_read=bar.update
            )
            for samples in tsv:
                writer.append_samples(dense=samples.dense, labels=samples.labels)
                ids.add(samples.ids, writer)
            tsvs.append(tsv)
    return tsvs


def _capped(ids: RawIds, caps: tuple[int, ...]) -> RawIds:
    return ids % np.array(caps, np.uint32)[:, None]


class HashedIds:
    """Maps an id to its remainder, and writes the table row at once."""

    def __init__(self, caps: tuple[int, ...]) -> None:
        self._caps = caps

    def add(self, ids: RawIds, writer: BlockWriter) -> None:
        writer.append_ids(_capped(ids, self._caps))

    def finish(self, writer: BlockWriter, num_train_rows: int) -> tuple[int, ...]:
        """Return the number of rows of each table."""
        return self._caps


class VocabularyIds:
    """Keeps the raw ids in one file per column until the vocabularies are known."""

    def __init__(self, folder: Path, *, caps: tuple[int, ...] | None, min_count: int) -> None:
        self._caps = caps
        self._min_count = min_count
        self._paths = [folder / f"{name}.raw" for name in DEFAULT_CAT_NAMES]
        self._files = [path.open("w+b") for path in self._paths]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for path, file in zip(self._paths, self._files, strict=True):
            file.close()
            path.unlink()

    def add(self, ids: RawIds, writer: BlockWriter) -> None:
        if self._caps is not None:
            ids = _capped(ids, self._caps)
        for file, column in zip(self._files, ids, strict=True):
            file.write(np.ascontiguousarray(column).data)

    def finish(self, writer: BlockWriter, num_train_rows: int) -> tuple[int, ...]:
        """Write the table rows of all ids; return the number of rows of each table."""
        vocabularies = [
            self._vocabulary(column, num_train_rows)
            for column in ProgressBar(range(len(self._files)), desc="counting ids")
        ]
        columns = zip(
            *(self._pieces(column, writer.num_rows) for column in range(len(self._files))),
            strict=True,
        )
        with ProgressBar(total=writer.num_rows, unit="rows", desc="mapping ids") as bar:
            for pieces in columns:
                rows = [v.rows(ids) for v, ids in zip(vocabularies, pieces, strict=True)]
                writer.append_ids(np.stack(rows))
                bar.update(len(pieces[0]))
        return tuple(vocabulary.num_embeddings for vocabulary in vocabularies)

    def _vocabulary(self, column: int, num_train_rows: int) -> Vocabulary:
        counter = IdCounter()
        for ids in self._pieces(column, num_train_rows):
            counter.add(ids)
        return Vocabulary(counter.ids(min_count=self._min_count))

    def _pieces(self, column: int, num_rows: int) -> Iterator[RawIds]:
        """Yield the first `num_rows` raw ids of a column, piece by piece."""
        file = self._files[column]
        file.seek(0)
        for start in range(0, num_rows, PIECE_ROWS):
            piece = file.read(4 * min(PIECE_ROWS, num_rows - start))
            yield np.frombuffer(piece, np.uint32)
