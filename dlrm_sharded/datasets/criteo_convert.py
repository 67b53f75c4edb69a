"""Converts Criteo TSVs to a folder of sample blocks, in memory that does not grow with the rows.

With a vocabulary the conversion reads the text once and writes one file of raw ids per column,
beside files of labels and dense features. It counts the ids of the training rows column by column,
and then maps all raw ids. These files need 157 B of disk per row until the end. With hashing, ids
are mapped while reading.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, INT_FEATURE_COUNT

from dlrm_sharded.datasets.block_writer import PartWriter
from dlrm_sharded.datasets.blocks import MANIFEST, BlocksManifest, Feature, Layout
from dlrm_sharded.datasets.build_once import build_once
from dlrm_sharded.datasets.criteo_source import CriteoSource, names_and_sizes
from dlrm_sharded.datasets.criteo_tsv import CriteoTsv, ParsedSamples
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
    layout = Layout(
        num_dense=INT_FEATURE_COUNT,
        num_single=len(DEFAULT_CAT_NAMES),
        num_lists=0,
        block_rows=source.block_rows,
    )
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(PartWriter(folder, 0, layout))
        ids: HashedIds | VocabularyIds
        if source.id_mapping == "vocabulary":
            columns = VocabularyIds(folder, caps=source.caps, min_count=source.min_count)
            ids = stack.enter_context(columns)
        else:
            assert source.caps is not None, "checked by CriteoSource"
            ids = HashedIds(source.caps)
        tsvs = _read([*train_paths, *val_paths], source, writer, ids)
        num_rows = sum(tsv.num_samples for tsv in tsvs)
        if val_paths:
            num_train_rows = sum(tsv.num_samples for tsv in tsvs[: len(train_paths)])
        else:
            num_train_rows = num_rows - math.floor(num_rows * source.val_share + 1e-6)
        num_embeddings = ids.finish(writer, num_rows, num_train_rows)
        part = writer.finish({})
    manifest = BlocksManifest(
        features=tuple(map(Feature, DEFAULT_CAT_NAMES, num_embeddings)),
        num_dense=INT_FEATURE_COUNT,
        block_rows=source.block_rows,
        num_train_rows=num_train_rows,
        parts=(part,),
        source={
            "settings": source.settings(),
            "train_files": names_and_sizes(train_paths),
            "val_files": names_and_sizes(val_paths),
            "num_malformed": [tsv.num_malformed for tsv in tsvs],
        },
    )
    manifest.save(folder)
    log.info(
        "%s samples for training, %s for validation, %s malformed lines left out, %s table rows",
        f"{num_train_rows:,}",
        f"{num_rows - num_train_rows:,}",
        f"{sum(tsv.num_malformed for tsv in tsvs):,}",
        f"{sum(num_embeddings):,}",
    )


def _read(
    paths: list[Path], source: CriteoSource, writer: PartWriter, ids: HashedIds | VocabularyIds
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
                ids.add(samples, writer)
            tsvs.append(tsv)
    return tsvs


def _capped(ids: RawIds, caps: tuple[int, ...]) -> RawIds:
    return ids % np.array(caps, np.uint32)[:, None]


def _append(
    writer: PartWriter,
    dense: npt.NDArray[np.float32],
    labels: npt.NDArray[np.uint8],
    ids: npt.NDArray[Any],
) -> None:
    no_lists = np.zeros((0, len(labels)), np.int32)
    writer.append(dense=dense, labels=labels, ids=ids, lengths=no_lists, values=())


class HashedIds:
    """Maps an id to its remainder, and writes the table row at once."""

    def __init__(self, caps: tuple[int, ...]) -> None:
        self._caps = caps

    def add(self, samples: ParsedSamples, writer: PartWriter) -> None:
        _append(writer, samples.dense, samples.labels, _capped(samples.ids, self._caps))

    def finish(self, writer: PartWriter, num_rows: int, num_train_rows: int) -> tuple[int, ...]:
        """Return the number of rows of each table."""
        return self._caps


class VocabularyIds:
    """Keeps the raw ids in one file per column until the vocabularies are known."""

    def __init__(self, folder: Path, *, caps: tuple[int, ...] | None, min_count: int) -> None:
        self._caps = caps
        self._min_count = min_count
        names = (*DEFAULT_CAT_NAMES, "dense", "labels")
        self._paths = [folder / f"{name}.raw" for name in names]
        self._files = [path.open("w+b") for path in self._paths]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for path, file in zip(self._paths, self._files, strict=True):
            file.close()
            path.unlink()

    def add(self, samples: ParsedSamples, writer: PartWriter) -> None:
        ids = samples.ids if self._caps is None else _capped(samples.ids, self._caps)
        for file, column in zip(self._files, (*ids, samples.dense, samples.labels), strict=True):
            file.write(np.ascontiguousarray(column).data)

    def finish(self, writer: PartWriter, num_rows: int, num_train_rows: int) -> tuple[int, ...]:
        """Write all samples; return the number of rows of each table."""
        vocabularies = [
            self._vocabulary(column, num_train_rows)
            for column in ProgressBar(range(len(DEFAULT_CAT_NAMES)), desc="counting ids")
        ]
        columns = [self._pieces(column, num_rows) for column in range(len(vocabularies))]
        dense = self._pieces(-2, num_rows, 4 * INT_FEATURE_COUNT)
        labels = self._pieces(-1, num_rows, 1)
        with ProgressBar(total=num_rows, unit="rows", desc="mapping ids") as bar:
            for some_dense, some_labels, *ids in zip(dense, labels, *columns, strict=True):
                rows = [
                    v.rows(np.frombuffer(i, np.uint32))
                    for v, i in zip(vocabularies, ids, strict=True)
                ]
                dense_rows = np.frombuffer(some_dense, np.float32).reshape(-1, INT_FEATURE_COUNT)
                _append(writer, dense_rows, np.frombuffer(some_labels, np.uint8), np.stack(rows))
                bar.update(len(some_labels))
        return tuple(vocabulary.num_embeddings for vocabulary in vocabularies)

    def _vocabulary(self, column: int, num_train_rows: int) -> Vocabulary:
        counter = IdCounter()
        for ids in self._pieces(column, num_train_rows):
            counter.add(np.frombuffer(ids, np.uint32))
        return Vocabulary(counter.ids(min_count=self._min_count))

    def _pieces(self, column: int, num_rows: int, row_bytes: int = 4) -> Iterator[bytes]:
        """Yield the first `num_rows` rows of a file, piece by piece."""
        file = self._files[column]
        file.seek(0)
        for start in range(0, num_rows, PIECE_ROWS):
            yield file.read(row_bytes * min(PIECE_ROWS, num_rows - start))
