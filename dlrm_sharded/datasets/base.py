"""What a dataset is to the trainer, and the one stream that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from dlrm_sharded.errors import ConfigError, DataError
from dlrm_sharded.tables import NUM_REUSE_BINS, Table

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


class Dataset(Protocol):
    """Random access to batches: a batch is found by its number, so any position can be resumed.

    A dataset is built with its hyperparameters and the global `batch_size`. One table is one
    sparse feature of the same name.
    """

    batch_size: int
    num_dense: int

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables with their profile (pooling factor, reuse histogram) measured on the data."""

    def num_batches(self, split: Split) -> int:
        """Batches in one epoch of a split. The last samples, less than a batch, are left out."""

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        """The share of one rank in one global batch.

        Returns:
            dense_features [b, num_dense] fp32, sparse_features with one key per table, labels
            [b] fp32, where b = batch_size / world_size; samples rank * b ... of the global batch.
        """


class BatchStream(Iterator[Batch]):
    """The batches of one rank, epoch after epoch, resumable at any batch.

    Iterating gives the rest of the current epoch; the next iteration is the next epoch. Batches
    of a shuffled stream come in an order that depends on the seed and the epoch alone.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
    ) -> None:
        if dataset.batch_size % world_size:
            raise ConfigError(
                f"batch_size is {dataset.batch_size:,}; it must be a multiple of the "
                f"{world_size} ranks that share it"
            )
        self._dataset = dataset
        self._split = split
        self._rank = rank
        self._world_size = world_size
        self._shuffle_seed = shuffle_seed
        self._num_batches = dataset.num_batches(split)
        if split == "train" and self._num_batches == 0:
            raise DataError(
                f"the training split has less than one batch of {dataset.batch_size:,} samples; "
                "lower batch_size or give more data"
            )
        self._epoch = 0
        self._position = 0
        self._order = self._order_of_epoch()

    def __len__(self) -> int:
        """Batches in one epoch."""
        return self._num_batches

    def __next__(self) -> Batch:
        if self._position >= self._num_batches:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of_epoch()
            raise StopIteration
        index = int(self._order[self._position])
        self._position += 1
        return self._dataset.batch(self._split, index, rank=self._rank, world_size=self._world_size)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of_epoch()

    def _order_of_epoch(self) -> np.ndarray:
        if self._shuffle_seed is None:
            return np.arange(self._num_batches)
        return np.random.default_rng([self._shuffle_seed, self._epoch]).permutation(
            self._num_batches
        )


def check_batch(batch: Batch, tables: Sequence[Table]) -> None:
    """Raise DataError where a batch is not one for the tables: other keys, or ids out of range.

    FBGEMM would take such ids for row 0 and train on.
    """
    features = batch.sparse_features.to_dict()
    if set(features) != {table.name for table in tables}:
        raise DataError(
            f"a batch has the features {sorted(features)}, the tables are "
            f"{sorted(table.name for table in tables)}"
        )
    for table in tables:
        ids = features[table.name].values()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < table.num_embeddings:
            raise DataError(
                f"table {table.name!r} has rows 0 to {table.num_embeddings - 1:,}, a batch has the "
                f"ids {int(ids.min()):,} to {int(ids.max()):,}"
            )


def reuse_histogram(ids: Tensor) -> tuple[float, ...]:
    """Share of unique ids in each reuse bin: used once, 2 times, 3-4, 5-8, ... over 32,768 times.

    Args:
        ids: [N], the ids of one table in one global batch; all zeros are returned for N = 0.
    """
    if ids.numel() == 0:
        return (0.0,) * NUM_REUSE_BINS
    uses = torch.unique(ids, return_counts=True)[1]
    bins = uses.double().log2().ceil().long().clamp(max=NUM_REUSE_BINS - 1)
    shares = torch.bincount(bins, minlength=NUM_REUSE_BINS).double() / uses.numel()
    return tuple(shares.tolist())


def profiled_table(
    name: str, num_embeddings: int, embedding_dim: int, *, ids: Tensor, num_samples: int
) -> Table:
    """A table whose profile is measured on the ids of `num_samples` samples.

    Args:
        ids: [N], all ids of the table in these samples.
    """
    return Table(
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        pooling_factor=ids.numel() / num_samples,
        reuse_histogram=reuse_histogram(ids),
    )
