"""Meta's dlrm_datasets: each file holds the sparse features of one large, production-like batch."""

from __future__ import annotations

import functools
import gzip
import itertools
import logging
import pickle
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split, profiled_table, share_of_batch
from dlrm_sharded.datasets.planted_labels import PlantedLabels
from dlrm_sharded.files.errors import ConfigError, DataError, check_count, check_number
from dlrm_sharded.plans.tables import Table

log = logging.getLogger(__name__)


class DlrmDatasets:
    """Cuts one file of Meta's dlrm_datasets (`.pt` or `.pt.gz`) into global batches.

    A file holds neither dense features nor labels. Both are planted (`PlantedLabels`), so accuracy
    shows that training works, but says nothing about real users.

    Letters: N ids, T tables, B samples.

    Args:
        path: unpack `.pt.gz` files if several ranks share a host, so that the ranks share the
            memory of the `.pt` file instead of unpacking a copy each.
        embedding_dim: width of all tables; the files have no widths.
        table_ids: positions in the file of the tables to use; by default all. No table can be used
            twice.
        val_share: share of the batches, from the end, for validation.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        batch_size: int,
        embedding_dim: int = 64,
        table_ids: Sequence[int] | None = None,
        val_share: float = 0.1,
        num_dense: int = 13,
        seed: int = 0,
    ) -> None:
        self.batch_size = batch_size
        self.num_dense = num_dense
        self._indices, self._offsets, self._lengths = _load(Path(path))
        num_tables, num_samples = self._lengths.shape
        self._table_ids = list(range(num_tables) if table_ids is None else table_ids)
        if not set(self._table_ids) <= set(range(num_tables)):
            raise ConfigError(
                f"table_ids is {self._table_ids}; it must have numbers from 0 to {num_tables - 1}"
            )
        check_count("batch_size", batch_size, least=1)
        if batch_size > num_samples:
            raise ConfigError(
                f"batch_size is {batch_size:,}, but {path} has only {num_samples:,} samples"
            )
        check_number("data.val_share", val_share, most=0.99)
        num_batches = num_samples // batch_size
        num_val = min(round(num_batches * val_share), num_batches - 1)
        self._num_batches = {"train": num_batches - num_val, "val": num_val}
        ids = [self._ids(table_id, 0, num_samples) for table_id in self._table_ids]
        self._unprofiled = tuple(
            Table(
                f"t{table_id:03d}",
                int(of_table.max()) + 1 if of_table.numel() else 1,
                embedding_dim,
                of_table.numel() / num_samples,
            )
            for table_id, of_table in zip(self._table_ids, ids, strict=True)
        )
        self._labels = PlantedLabels(self._unprofiled, num_dense=num_dense, seed=seed)
        log.info(
            "%s: %s samples; dense features and labels are planted, the file has none",
            path,
            f"{num_samples:,}",
        )

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables with the profile of the first global batch."""
        return tuple(
            profiled_table(
                table.name,
                table.num_embeddings,
                table.embedding_dim,
                ids=self._ids(table_id, 0, self.batch_size).long(),
                num_samples=self.batch_size,
            )
            for table, table_id in zip(self._unprofiled, self._table_ids, strict=True)
        )

    def num_batches(self, split: Split) -> int:
        return self._num_batches[split]

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        first, num_samples = share_of_batch(self, split, index, rank=rank, world_size=world_size)
        in_file = first + (self.batch_size * self._num_batches["train"] if split == "val" else 0)
        ids = [self._ids(table_id, in_file, num_samples) for table_id in self._table_ids]
        length_per_key = [part.numel() for part in ids]
        lengths = self._lengths[self._table_ids, in_file : in_file + num_samples]
        sparse = KeyedJaggedTensor(
            keys=[table.name for table in self._unprofiled],
            values=torch.cat(ids).int(),
            lengths=lengths.reshape(-1).int(),
            stride=num_samples,
            length_per_key=length_per_key,
            offset_per_key=[0, *itertools.accumulate(length_per_key)],
        )
        return self._labels.batch(split, first, sparse)

    def _ids(self, table_id: int, first: int, num_samples: int) -> Tensor:
        """Return [N], the ids of a table in the samples first, first + 1, ... of the file."""
        begin = table_id * self._lengths.shape[1] + first
        return self._indices[int(self._offsets[begin]) : int(self._offsets[begin + num_samples])]


def _load(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return `indices` [N], `offsets` [T * B + 1] and `lengths` [T, B] after checking them."""
    if not path.is_file():
        raise DataError(
            f"{path} is not a file; download a file of Meta's dlrm_datasets (git-lfs) and set "
            "data.path, or use data=dlrm_datasets_pool, which needs none"
        )
    try:
        if path.suffix == ".gz":
            loaded = _load_gzip(path)
        else:  # only torch's zip format can be mapped; ranks share the memory of a mapped file
            is_zip = zipfile.is_zipfile(path)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error, pickle.UnpicklingError) as e:
        raise DataError(
            f"{path} ({path.stat().st_size:,} B) cannot be read as a file of torch.save: it is "
            "truncated, a git-lfs pointer, or something else; download it again"
        ) from e
    if not (isinstance(loaded, list | tuple) and [*map(type, loaded)] == [Tensor] * 3):
        raise DataError(f"{path} must hold the three tensors indices, offsets and lengths")
    indices, offsets, lengths = loaded
    shapes = f"indices {[*indices.shape]}, offsets {[*offsets.shape]}, lengths {[*lengths.shape]}"
    if (
        indices.dim() != 1
        or lengths.dim() != 2
        or offsets.shape != (lengths.numel() + 1,)
        or int(offsets[-1]) != indices.numel()
        or not torch.equal(offsets.diff(), lengths.reshape(-1).to(offsets.dtype))
    ):
        raise DataError(
            f"{path} has {shapes}; expected [N], [T * B + 1] and [T, B], with offsets that are "
            "sums of the lengths up to N"
        )
    return indices, offsets, lengths


def _load_gzip(path: Path) -> object:
    # torch.load seeks, and in a gzip stream each seek backwards unpacks again from the start
    with tempfile.TemporaryFile() as unpacked:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, unpacked, length=2**24)
        unpacked.seek(0)
        return torch.load(unpacked, map_location="cpu", weights_only=True)
