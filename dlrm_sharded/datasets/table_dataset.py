"""Users' own data: serves files of columns, which a schema describes, as batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split, profiled_table, share_of_batch
from dlrm_sharded.datasets.block_reader import BlockReader, BlockRows
from dlrm_sharded.datasets.blocks import BlocksManifest
from dlrm_sharded.datasets.conversion import ENCODER_FOLDER, convert
from dlrm_sharded.datasets.schema import Schema, read_schema
from dlrm_sharded.datasets.table_source import TableSource
from dlrm_sharded.files.errors import ConfigError, DataError, check_count, check_path
from dlrm_sharded.files.line_file import changed_settings
from dlrm_sharded.plans.tables import Table

log = logging.getLogger(__name__)

ID_DTYPE = torch.int32
"""Ids keep their stored type, which halves the bytes of their exchange compared with int64."""


class TableDataset:
    """Serves batches of files, which are converted to blocks when first used.

    Args:
        files: paths, folders or globs of Parquet, CSV or TSV files, in the order of their rows.
        schema: path of a yaml file, or its content; see `schema.Schema`.
        batch_size: global; an incomplete last batch of a split is left out.
        blocks_dir: folder of the converted data; None for one beside the schema's file, whose name
            depends on the files and the schema.
        embedding_dim: width of tables without a width in the schema; None for the schema's `dim`.
        options: see `table_source.TableSource`.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        schema: str | Mapping[str, Any],
        *,
        batch_size: int,
        blocks_dir: str | Path | None = None,
        embedding_dim: int | None = None,
        **options: Any,
    ) -> None:
        check_count("batch_size", batch_size, least=1)
        self.batch_size = batch_size
        self.schema = schema_with(schema, dim=embedding_dim)
        self.num_dense = self.schema.num_dense
        if blocks_dir is not None:
            check_path("data.blocks_dir", blocks_dir)
        elif not isinstance(schema, str):
            raise ConfigError(
                "data.blocks_dir is null, which needs a file as data.schema; set "
                "data.blocks_dir to a folder for the converted data"
            )
        self._schema_file, self._blocks_dir = schema, blocks_dir
        self._source = TableSource(files, self.schema, **options)

    @functools.cached_property
    def blocks_dir(self) -> Path:
        """Folder of the converted data."""
        if self._blocks_dir is not None:
            return Path(self._blocks_dir)
        return self._source.blocks_beside(str(self._schema_file))

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables with the profile of the first global batch."""
        manifest = self._blocks.manifest
        num_samples = min(self.batch_size, manifest.num_rows)
        features = self._new_batch(self._blocks.rows(0, num_samples)).sparse_features
        num_embeddings = {feature.name: feature.num_embeddings for feature in manifest.features}
        return tuple(
            profiled_table(
                table.name,
                num_embeddings[table.columns[0]],
                table.dim,
                ids=torch.cat([features[name].values() for name in table.columns]),
                num_samples=num_samples,
                features=table.columns,
            )
            for table in self.schema.tables().values()
        )

    @property
    def ids_per_sample(self) -> Mapping[str, int] | None:
        return self._blocks.manifest.ids_per_sample

    @property
    def encoder_folder(self) -> Path:
        return self.blocks_dir / ENCODER_FOLDER

    def num_batches(self, split: Split) -> int:
        start, stop = self._row_range(split)
        return (stop - start) // self.batch_size

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        first, num_samples = share_of_batch(self, split, index, rank=rank, world_size=world_size)
        start = self._row_range(split)[0] + first
        rows = self._blocks.rows(start, start + num_samples)
        return self._new_batch(rows)

    @functools.cached_property
    def _new_batch(self) -> BatchMaker:
        return BatchMaker(self._blocks.manifest)

    @functools.cached_property
    def _blocks(self) -> BlockReader:
        convert(self._source, self.blocks_dir)
        blocks = BlockReader(self.blocks_dir)
        _check_source(blocks.manifest, self._source, self.blocks_dir)
        num_val = blocks.manifest.num_rows - blocks.manifest.num_train_rows
        if 0 < num_val < self.batch_size:
            log.warning(
                "validation is left out: its %s samples are fewer than a batch; give more, "
                "or lower batch_size",
                f"{num_val:,}",
            )
        return blocks

    def _row_range(self, split: Split) -> tuple[int, int]:
        manifest = self._blocks.manifest
        if split == "train":
            return 0, manifest.num_train_rows
        return manifest.num_train_rows, manifest.num_rows


class BatchMaker:
    """Makes batches from rows of blocks, in which features of one id come before lists."""

    def __init__(self, manifest: BlocksManifest) -> None:
        self._keys = [feature.name for feature in manifest.features]
        self._num_single = manifest.layout.num_single
        self._parts = functools.lru_cache(maxsize=4)(self._constant_parts)

    def __call__(self, rows: BlockRows) -> Batch:
        num_samples = len(rows.labels)
        values, parts = rows.ids.reshape(-1), self._parts(num_samples)
        if len(rows.lengths):
            values = np.concatenate([values, rows.values])
            lengths = torch.cat([parts["lengths"], torch.from_numpy(rows.lengths.reshape(-1))])
            per_key = parts["length_per_key"] + rows.lengths.sum(axis=1, dtype=np.int64).tolist()
            parts = {
                **parts,
                "lengths": lengths,
                "length_per_key": per_key,
                # given here, because computing them from lengths on a GPU would wait for the device
                "offset_per_key": [0, *np.cumsum(per_key).tolist()],
            }
        return Batch(
            dense_features=torch.from_numpy(rows.dense),
            sparse_features=KeyedJaggedTensor(values=torch.from_numpy(values), **parts),
            labels=torch.from_numpy(rows.labels),
        )

    def _constant_parts(self, num_samples: int) -> dict[str, Any]:
        """Return the parts that are equal in all batches of `num_samples` samples."""
        num_single = self._num_single
        num_ids = num_single * num_samples
        parts: dict[str, Any] = {
            "keys": self._keys,
            "lengths": torch.ones(num_ids, dtype=ID_DTYPE),
            "stride": num_samples,
            "length_per_key": [num_samples] * num_single,
            "offset_per_key": list(range(0, num_ids + 1, num_samples)),
            "index_per_key": {feature: i for i, feature in enumerate(self._keys)},
        }
        if num_single == len(self._keys):
            parts["offsets"] = torch.arange(num_ids + 1, dtype=ID_DTYPE)
        return parts


def schema_with(schema: str | Mapping[str, Any], *, dim: int | None) -> Schema:
    """Return a schema, with `dim` as the default width of its tables unless it is None."""
    found = read_schema(schema)
    if dim is None:
        return found
    return read_schema(found.to_json() | {"dim": dim}, name="data.schema, data.embedding_dim")


def _check_source(manifest: BlocksManifest, source: TableSource, blocks_dir: Path) -> None:
    """Raise DataError if settings or remaining files differ from those of the conversion."""
    made_of = manifest.source
    if "schema" not in made_of.get("settings", {}):  # of an earlier release
        return
    before = {**made_of, **made_of["settings"]}
    try:
        now = source.described()
    except DataError:
        log.info(
            "some files of data.files no longer exist; using the converted data in %s", blocks_dir
        )
        now = {"settings": source.settings()}
    now |= now.pop("settings")
    if changes := changed_settings({key: before.get(key) for key in now}, now):
        raise DataError(
            f"{blocks_dir} was converted from another source: {changes}; "
            "set data.blocks_dir to another folder; models that were trained on these blocks need "
            "them to be evaluated and exported"
        )
