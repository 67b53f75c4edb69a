"""Criteo click logs: Kaggle's train.txt and the 24 days of the 1TB set, from the original TSVs.

Values follow `facebookresearch/dlrm` (`data_utils.py`): a missing or negative integer is 0, and
dense features are log(1 + x); a missing categorical is id 0, which the hexadecimal 00000000 is
too; `max_ind_range` takes ids modulo a number before anything else. Kaggle's validation is the
last seventh of the rows.

It differs from it in this:
- The vocabulary is built on the training rows alone; there it is built on the validation and test
  rows too. Unseen ids share table row 1, with those rarer than `min_count` in training (3, the
  threshold of TorchRec's preprocessing; there is none in dlrm).
- Rows are ordered by raw id, not by first appearance (see `vocabulary.py`).
- All of the last day or seventh is for validation; there it is split into validation and test.
- Rows stay in file order: the trainer shuffles batches, not rows.
- Malformed lines are reported and left out; there they end the program with a traceback.
`id_mapping=hash` makes one pass: the table row is the id modulo `max_ind_range`.
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

from dlrm_sharded.datasets.base import Split, profiled_table
from dlrm_sharded.datasets.blocks import MAKE_IT_AGAIN, Blocks, Manifest
from dlrm_sharded.datasets.criteo_convert import convert, is_converted
from dlrm_sharded.datasets.criteo_source import CriteoSource, described
from dlrm_sharded.errors import ConfigError, DataError
from dlrm_sharded.tables import Table

__all__ = ["CriteoDataset", "CriteoSource", "convert"]

log = logging.getLogger(__name__)

ID_DTYPE = torch.int32
"""As stored: half the bytes of int64 in the id exchange; TorchRec widens them for the lookup."""


class CriteoDataset:
    """A folder of blocks, which is converted from TSVs at the first use if it is not there yet.

    Args:
        blocks_dir: the converted data.
        batch_size: global; all batches of a split have this size, the rest is left out.
        embedding_dim: of all 26 tables.
        source: what to convert; if the data is converted already, it is checked to be from this.
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
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, must be >= 1")
        self.batch_size = batch_size
        self._blocks_dir = Path(blocks_dir)
        self._embedding_dim = embedding_dim
        self._source = source
        self._one_hot = functools.lru_cache(maxsize=4)(self._one_hot_of)

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        """The 26 tables, profiled on the first global batch."""
        manifest = self._blocks.manifest
        ids = torch.from_numpy(self._blocks.rows(0, self.batch_size).ids)
        return tuple(
            profiled_table(
                name,
                num_embeddings,
                self._embedding_dim,
                ids=column,
                num_samples=self.batch_size,
            )
            for name, num_embeddings, column in zip(
                manifest.feature_names, manifest.num_embeddings, ids, strict=True
            )
        )

    def num_batches(self, split: Split) -> int:
        start, stop = self._row_range(split)
        return (stop - start) // self.batch_size

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        local_batch_size, rest = divmod(self.batch_size, world_size)
        assert not rest, "checked by BatchStream"
        if not 0 <= index < self.num_batches(split):
            raise IndexError(f"batch {index} of {self.num_batches(split):,} {split} batches")
        start = self._row_range(split)[0] + index * self.batch_size + rank * local_batch_size
        rows = self._blocks.rows(start, start + local_batch_size)
        return Batch(
            dense_features=torch.from_numpy(rows.dense),
            sparse_features=self._one_hot(local_batch_size).kjt(torch.from_numpy(rows.ids)),
            labels=torch.from_numpy(rows.labels),
        )

    @functools.cached_property
    def _blocks(self) -> Blocks:
        if self._source is not None:
            convert(self._source, self._blocks_dir)
        elif not is_converted(self._blocks_dir):
            raise DataError(
                f"{self._blocks_dir} holds no converted data; convert with "
                "scripts/convert_criteo.py, or set data.source to the Criteo files"
            )
        blocks = Blocks(self._blocks_dir)
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

    def _one_hot_of(self, num_samples: int) -> _OneHot:
        return _OneHot(self._blocks.manifest.feature_names, num_samples)


class _OneHot:
    """What is the same in all KJTs with F features and one id per feature of B samples."""

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
        """The KJT of ids [F, B]."""
        return KeyedJaggedTensor(values=ids.reshape(-1).to(ID_DTYPE), **self._parts)


def _check_source(manifest: Manifest, source: CriteoSource, blocks_dir: Path) -> None:
    """That a folder was converted from this source; removed TSVs cannot be and are not compared."""
    made_with, wanted = manifest.source["settings"], source.settings()
    differing = [
        f"{key} was {made_with.get(key)}, is now {value}"
        for key, value in wanted.items()
        if made_with.get(key) != value
    ]
    try:
        train_paths, val_paths = source.paths()
    except DataError:
        log.info("the TSVs of %s are not here; using what was converted", blocks_dir)
    else:
        for kind, paths in (("train_files", train_paths), ("val_files", val_paths)):
            if manifest.source[kind] != described(paths):
                differing.append(
                    f"{kind} (name, bytes) were {manifest.source[kind]}, are now {described(paths)}"
                )
    if differing:
        raise DataError(
            f"{blocks_dir} was converted from another source: {'; '.join(differing)}; "
            f"set data.blocks_dir to another folder, or {MAKE_IT_AGAIN}"
        )
