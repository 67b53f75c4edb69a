"""The protocol of datasets, and the stream that serves the batches of a dataset to the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.id_check import IdCheck, find_faults
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table, tables_by_feature

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


class Dataset(Protocol):
    """Random access to batches by their number, so that a run can resume at any batch.

    A dataset is built from its hyperparameters and the global `batch_size`. The features of
    batches are the `feature_names` of all tables. `testing.check_dataset` checks all of this.
    """

    batch_size: int
    num_dense: int

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables with their pooling factors and reuse histograms, measured on the data."""

    def num_batches(self, split: Split) -> int:
        """Return the number of batches in an epoch; an incomplete last batch is left out."""

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        """Return one rank's share of a global batch: its samples rank * b ... (rank + 1) * b - 1.

        Returns:
            dense_features [b, num_dense] fp32, sparse_features with the features as keys, in the
            same order in every batch, and labels [b] fp32 from 0 to 1; b = batch_size / world_size.
        """


@runtime_checkable
class CachingDataset(Protocol):
    """A dataset that keeps batches in memory."""

    def cached_bytes(self, *, num_train_batches: int, num_val_batches: int, world_size: int) -> int:
        """Return the bytes of the batches that one rank keeps once it has read these numbers."""


def ids_per_sample(dataset: Dataset) -> Mapping[str, int] | None:
    """Return the number of ids in each sample by feature; None if it varies for any feature."""
    found: Mapping[str, int] | None = getattr(dataset, "ids_per_sample", None)
    return found


def encoder_folder(dataset: Dataset) -> str | None:
    """Return the folder of a dataset's encoder; None if it has none, as in blocks of format 1."""
    folder: Path | None = getattr(dataset, "encoder_folder", None)
    return None if folder is None or not folder.is_dir() else str(folder.absolute())


class BatchStream(Iterator[Batch]):
    """Iterates over the batches of one rank, epoch after epoch.

    A loop over the stream yields the rest of the current epoch, and the next loop the next epoch.
    The order of a shuffled stream depends only on the seed and the epoch.

    Args:
        bounds: what to do about ids beyond a table's rows, one of `id_check.BOUNDS`.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle_seed: int | None = None,
        bounds: str = "warn",
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
        self.check = IdCheck(dataset.tables, bounds)
        self._ids_per_sample = ids_per_sample(dataset)
        self.seek(0)

    def __len__(self) -> int:
        """Return the number of batches in one epoch."""
        return self._num_batches

    def __next__(self) -> Batch:
        if self._position >= self._num_batches:
            self._start_epoch(self._epoch + 1)
            raise StopIteration
        index = int(self._order[self._position])
        number = self._epoch * self._num_batches + self._position
        self._position += 1
        batch = self._dataset.batch(
            self._split, index, rank=self._rank, world_size=self._world_size
        )
        checked = self.check(batch, number)
        check_lengths(checked, self._ids_per_sample)
        check_labels(checked)
        return checked

    def seek(self, num_batches: int) -> None:
        """Continue as a new stream would after `num_batches` batches, counted over all epochs."""
        epoch, position = divmod(num_batches, max(1, self._num_batches))
        self._start_epoch(epoch)
        self._position = position
        self.check.forget(num_batches)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = np.arange(self._num_batches)
        if self._shuffle_seed is not None:
            np.random.default_rng([self._shuffle_seed, epoch]).shuffle(self._order)


def share_of_batch(
    dataset: Dataset, split: Split, index: int, *, rank: int, world_size: int
) -> tuple[int, int]:
    """Return the first sample, numbered in the split, and the size of a rank's share of a batch.

    Raises:
        IndexError: the split has no such batch.
    """
    num_batches = dataset.num_batches(split)
    if not 0 <= index < num_batches:
        raise IndexError(f"{split} batch {index} of {num_batches:,}")
    num_samples, rest = divmod(dataset.batch_size, world_size)
    assert not rest, "checked by BatchStream"
    return index * dataset.batch_size + rank * num_samples, num_samples


def page_locked(batch: Batch) -> Batch:
    """Return the batch in page-locked memory, from which a GPU copies while it computes."""
    if batch.dense_features.is_pinned():
        return batch
    return batch.pin_memory()


def check_batch(batch: Batch, tables: Sequence[Table]) -> None:
    """Raise DataError if a batch does not fit the tables: other keys, or wrong ids."""
    check_keys(batch, tables)
    by_feature, num_samples = tables_by_feature(tables), len(batch.dense_features)
    for fault in find_faults(batch.sparse_features, by_feature, num_samples):
        raise DataError(f"in a batch, {fault.text}")


def check_lengths(batch: Batch, ids_per_sample: Mapping[str, int] | None) -> None:
    """Raise DataError unless a batch has the expected number of ids of each feature.

    Ranks send as many ids as they expect, so a batch must not have more or fewer. Only the total of
    a feature is checked, and nothing if `ids_per_sample` is None.
    """
    if ids_per_sample is None:
        return
    features, num_samples = batch.sparse_features, len(batch.dense_features)
    for name, found in zip(features.keys(), features.length_per_key(), strict=True):
        if found != num_samples * ids_per_sample[name]:
            raise DataError(
                f"a batch of {num_samples:,} samples has {found:,} ids of feature {name!r}, and "
                f"the dataset says that each sample has {ids_per_sample[name]:,}"
            )


def check_labels(batch: Batch) -> None:
    """Raise DataError if a label is not from 0 to 1: its loss would have no least value."""
    low, high = (float(label) for label in batch.labels.aminmax())
    if not 0 <= low <= high <= 1:
        raise DataError(
            f"a batch has labels from {low:g} to {high:g}, which must be 0 or 1; correct the data, "
            "or convert it again if its blocks are damaged"
        )


def check_keys(batch: Batch, tables: Sequence[Table]) -> None:
    """Raise DataError if the features of a batch are not those of the tables."""
    features = batch.sparse_features.keys()
    known = sorted(name for table in tables for name in table.feature_names)
    if sorted(features) != known:
        raise DataError(f"a batch has the features {sorted(features)}, the tables have {known}")


def reuse_histogram(ids: Tensor) -> tuple[float, ...]:
    """Return the share of unique ids that are used 1, 2, 3-4, 5-8, ..., over 32,768 times.

    Args:
        ids: [N], the ids of one table in one global batch; for N = 0 all shares are zero.
    """
    if ids.numel() == 0:
        return (0.0,) * NUM_REUSE_BINS
    uses = torch.unique(ids, return_counts=True)[1]
    bins = uses.double().log2().ceil().long().clamp(max=NUM_REUSE_BINS - 1)
    shares = torch.bincount(bins, minlength=NUM_REUSE_BINS).double() / uses.numel()
    return tuple(shares.tolist())


def profiled_table(
    name: str,
    num_embeddings: int,
    embedding_dim: int,
    *,
    ids: Tensor,
    num_samples: int,
    features: Sequence[str] = (),
) -> Table:
    """Return a table with the profile of these ids.

    Args:
        ids: [N], all ids of all features of the table in `num_samples` samples.
        features: see `Table.features`.
    """
    return Table(
        name=name,
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        pooling_factor=ids.numel() / num_samples,
        reuse_histogram=reuse_histogram(ids),
        num_features=max(1, len(features)),
        features=tuple(features),
    )
