"""Criteo click logs: Kaggle's train.txt and the 24 days of the 1TB set, from the original TSVs.

Values are those of `facebookresearch/dlrm` (`data_utils.py`): missing and negative integers are 0,
dense features are log(1 + x), missing categoricals are id 0, as is the hexadecimal 00000000, and
ids are taken modulo `max_ind_range` before anything else. Kaggle's validation data is the last
seventh of the rows.

Differences from facebookresearch/dlrm:
- The vocabulary is built from the training rows only, not from validation and test rows too. Unseen
  ids share table row 1 with ids that are rarer than `min_count` in training. Its default of 3 is
  the threshold of TorchRec's preprocessing; dlrm has none.
- Table rows are in the order of the raw ids, not of their first appearance (see `vocabulary.py`).
- All of the last day or seventh is validation data; dlrm splits it into validation and test data.
- Rows stay in file order; the trainer shuffles batches, not rows.
- Malformed lines are reported and left out; dlrm ends with a traceback.
With `id_mapping=hash` the table row of an id is the id modulo `max_ind_range`.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrec.datasets.criteo import INT_FEATURE_COUNT
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split, profiled_table, share_of_batch
from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.blocks import CONVERT_AGAIN, BlocksManifest
from dlrm_sharded.datasets.criteo_convert import convert, is_converted
from dlrm_sharded.datasets.criteo_source import CriteoSource, names_and_sizes
from dlrm_sharded.files.errors import ConfigError, DataError, check_count, check_path
from dlrm_sharded.files.line_file import changed_settings
from dlrm_sharded.plans.tables import Table

__all__ = ["CriteoDataset", "CriteoSource", "convert"]

log = logging.getLogger(__name__)

ID_DTYPE = torch.int32
"""Ids stay as they are stored, which halves the bytes of their exchange compared with int64."""


class CriteoDataset:
    """Serves batches of converted data; data that is not converted yet is converted at first use.

    Args:
        blocks_dir: folder of the converted data.
        batch_size: global; an incomplete last batch of a split is left out.
        embedding_dim: width of all 26 tables.
        source: files to convert; data that was converted from other files is refused.
    """

    num_dense = INT_FEATURE_COUNT

    def __init__(
        self,
        blocks_dir: str | Path,
        *,
        batch_size: int,
        embedding_dim: int,
        source: CriteoSource | None = None,
    ) -> None:
        check_count("batch_size", batch_size, least=1)
        check_count("data.embedding_dim", embedding_dim, least=4)
        check_path("data.blocks_dir", blocks_dir)
        self.batch_size = batch_size
        self._blocks_dir = Path(blocks_dir)
        self._embedding_dim = embedding_dim
        self._source = source
        self._one_hot = functools.lru_cache(maxsize=4)(
            lambda num_samples: _OneHotTemplate(
                tuple(feature.name for feature in self._blocks.manifest.features), num_samples
            )
        )

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        """The 26 tables with the profile of the first global batch."""
        features = self._blocks.manifest.features
        ids = torch.from_numpy(self._blocks.rows(0, self.batch_size).ids)
        return tuple(
            profiled_table(
                feature.name,
                feature.num_embeddings,
                self._embedding_dim,
                ids=column,
                num_samples=self.batch_size,
            )
            for feature, column in zip(features, ids, strict=True)
        )

    @property
    def ids_per_sample(self) -> dict[str, int]:
        return {table.name: 1 for table in self.tables}

    def num_batches(self, split: Split) -> int:
        start, stop = self._row_range(split)
        return (stop - start) // self.batch_size

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        first, num_samples = share_of_batch(self, split, index, rank=rank, world_size=world_size)
        start = self._row_range(split)[0] + first
        rows = self._blocks.rows(start, start + num_samples)
        return Batch(
            dense_features=torch.from_numpy(rows.dense),
            sparse_features=self._one_hot(num_samples).kjt(torch.from_numpy(rows.ids)),
            labels=torch.from_numpy(rows.labels),
        )

    @functools.cached_property
    def _blocks(self) -> BlockReader:
        if self._source is not None:
            convert(self._source, self._blocks_dir)
        elif not is_converted(self._blocks_dir):
            raise DataError(
                f"{self._blocks_dir} holds no converted data; convert with "
                "dlrm-convert-criteo, or set data.source to the Criteo files"
            )
        blocks = BlockReader(self._blocks_dir)
        if self._source is not None:
            _check_source(blocks.manifest, self._source, self._blocks_dir)
        if blocks.manifest.num_train_rows < self.batch_size:
            raise ConfigError(
                f"batch_size is {self.batch_size:,}, but {self._blocks_dir} has only "
                f"{blocks.manifest.num_train_rows:,} samples for training; lower batch_size"
            )
        return blocks

    def _row_range(self, split: Split) -> tuple[int, int]:
        manifest = self._blocks.manifest
        if split == "train":
            return 0, manifest.num_train_rows
        return manifest.num_train_rows, manifest.num_rows


class _OneHotTemplate:
    """The parts that are equal in all KJTs with F features and one id per feature of B samples."""

    def __init__(self, features: tuple[str, ...], num_samples: int) -> None:
        num_ids = len(features) * num_samples
        offset_per_key = list(range(0, num_ids + 1, num_samples))
        self._parts: dict[str, Any] = {
            "keys": list(features),
            "lengths": torch.ones(num_ids, dtype=ID_DTYPE),
            "offsets": torch.arange(num_ids + 1, dtype=ID_DTYPE),
            "stride": num_samples,
            "stride_per_key": [num_samples] * len(features),
            "length_per_key": [num_samples] * len(features),
            "offset_per_key": offset_per_key,
            "lengths_offset_per_key": offset_per_key,
            "index_per_key": {feature: i for i, feature in enumerate(features)},
        }

    def kjt(self, ids: Tensor) -> KeyedJaggedTensor:
        """Return the KJT of ids [F, B]."""
        return KeyedJaggedTensor(values=ids.reshape(-1).to(ID_DTYPE), **self._parts)


def _check_source(manifest: BlocksManifest, source: CriteoSource, blocks_dir: Path) -> None:
    """Raise DataError if settings or remaining TSVs differ from those of the conversion."""
    expected: dict[str, type] = {"settings": dict, "train_files": list, "val_files": list}
    for key, form in expected.items():
        if not isinstance(manifest.source.get(key), form):
            raise DataError(f"{blocks_dir} does not say from what it was made; {CONVERT_AGAIN}")
    converted_with, now = manifest.source["settings"], source.settings()
    before = {key: converted_with.get(key) for key in now}
    try:
        train_paths, val_paths = source.paths()
    except DataError:
        log.info("the TSVs of %s are no longer there; using the converted data", blocks_dir)
    else:
        for kind, paths in (("train_files", train_paths), ("val_files", val_paths)):
            before[kind], now[kind] = manifest.source[kind], names_and_sizes(paths)
    if changes := changed_settings(before, now):
        raise DataError(
            f"{blocks_dir} was converted from another source: {changes}; "
            f"set data.blocks_dir to another folder, or {CONVERT_AGAIN}"
        )
