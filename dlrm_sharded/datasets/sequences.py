"""Datasets of sequences: every table's ids of a sample, in the order of the user's history."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.accesses.zipf import scatter_ranks
from dlrm_sharded.datasets.base import Split, share_of_batch
from dlrm_sharded.datasets.counter_random import random_bits, stream_key, uniform_pairs, uniforms
from dlrm_sharded.datasets.planted_labels import PlantedLabels
from dlrm_sharded.datasets.sequence_tables import (
    NUM_CANDIDATES,
    NUM_CATEGORIES,
    NUM_ITEMS,
    NUM_TIMESTAMPS,
    NUM_USERS,
    SESSION_IDS,
    SESSION_SHARE,
    TRAIN_TIMESTAMPS,
    profiled_streaming_tables,
)
from dlrm_sharded.files.errors import check_count
from dlrm_sharded.plans.tables import Table

SampleIds = dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
"""A table's ids of some samples, [N], and each sample's number of ids, [B], by table."""


class SequenceDataset(ABC):
    """Serves the ids of samples as batches, with planted dense features and labels.

    Args:
        num_batches: number of batches of each split.
    """

    num_dense = 1
    tables: tuple[Table, ...]

    def __init__(
        self, tables: tuple[Table, ...], batch_size: int, num_batches: dict[Split, int], seed: int
    ) -> None:
        self.batch_size = batch_size
        self._names = [table.name for table in tables]
        self._num_batches = num_batches
        self._labels = PlantedLabels(tables, num_dense=self.num_dense, seed=seed)

    @abstractmethod
    def sample_ids(self, split: Split, first: int, num_samples: int) -> SampleIds:
        """Return the ids of the samples first, first + 1, ... of a split."""

    def num_batches(self, split: Split) -> int:
        return self._num_batches[split]

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        first, num_samples = share_of_batch(self, split, index, rank=rank, world_size=world_size)
        found = self.sample_ids(split, first, num_samples)
        of_tables = [found[name] for name in self._names]
        sparse = KeyedJaggedTensor(
            keys=self._names,
            values=torch.from_numpy(np.concatenate([ids for ids, _ in of_tables])).int(),
            lengths=torch.from_numpy(np.concatenate([lengths for _, lengths in of_tables])).int(),
            stride=num_samples,
        )
        return self._labels.batch(split, first, sparse)

    def table_ids(
        self, table: str, split: Split, index: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return a table's ids in a global batch, [N], and each sample's number of ids, [B]."""
        found = self.sample_ids(split, index * self.batch_size, self.batch_size)
        ids, lengths = found[table]
        return ids.astype(np.int32), lengths.astype(np.int32)


SAMPLES_PER_PASS = 64
"""Samples generated together, so that intermediate arrays stay small: 0.4 M ids at most."""

MAX_SESSION_IDS = 256
CATEGORIES_OF_USER = 4
SLICE_ITEMS = NUM_ITEMS // NUM_CATEGORIES // NUM_TIMESTAMPS
"""Items of a category that appear at one timestamp."""


class StreamingDataset(SequenceDataset):
    """DLRMv3's streaming set, generated: histories grow and the popularity of items drifts.

    Every id is a pure function of seed, user, session and slot, so that a user's history at a later
    timestamp continues the one before. What differs from the published generator: a user's four
    categories are equally likely and may repeat, and there are no ratings.

    Letters: B samples, S sessions, N ids.

    Args:
        timestamp: of all batches; None lets an epoch go through the 90 timestamps for training, and
            tables then have the profile of the one in the middle.
        num_train_batches: None for the published set's 315 M samples.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        timestamp: int | None = None,
        num_train_batches: int | None = None,
        num_val_batches: int = 20,
        seed: int = 0,
    ) -> None:
        check_count("batch_size", batch_size, least=1)
        check_count("data.num_val_batches", num_val_batches, least=0)
        if num_train_batches is None:
            num_train_batches = int(TRAIN_TIMESTAMPS * SESSION_SHARE * NUM_USERS) // batch_size
        check_count("data.num_train_batches", num_train_batches, least=0)
        if timestamp is not None:
            check_count("data.timestamp", timestamp, least=0, most=NUM_TIMESTAMPS - 1)
        self._timestamp = timestamp
        profiled_at = TRAIN_TIMESTAMPS // 2 if timestamp is None else timestamp
        self.tables = profiled_streaming_tables(profiled_at, batch_size=batch_size)
        self._keys = {
            name: stream_key(seed, name) for name in ("session", "length", "category", "item")
        }
        self._users = stream_key(seed, "users")
        counts: dict[Split, int] = {"train": num_train_batches, "val": num_val_batches}
        super().__init__(self.tables, batch_size, counts, seed)

    def sample_ids(self, split: Split, first: int, num_samples: int) -> SampleIds:
        timestamp = self._timestamp_of(split, first // self.batch_size)
        # the samples of a timestamp are of different users, in random order
        number = np.arange(first, first + num_samples)
        users = scatter_ranks(number % NUM_USERS, NUM_USERS, self._users)
        passes = range(0, num_samples, SAMPLES_PER_PASS)
        parts = [self._items(users[i : i + SAMPLES_PER_PASS], timestamp) for i in passes]
        items, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return {
            "item_id": (items, lengths),
            "item_category_id": (items // (SLICE_ITEMS * NUM_TIMESTAMPS), lengths),
            "user_id": (users, np.ones(num_samples, dtype=np.int64)),
        }

    def _timestamp_of(self, split: Split, index: int) -> int:
        if self._timestamp is not None:
            return self._timestamp
        if split == "val":
            return TRAIN_TIMESTAMPS
        return index * TRAIN_TIMESTAMPS // self._num_batches["train"]

    def _items(
        self, users: NDArray[np.int64], timestamp: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return [N], the histories with the candidates after each, and their lengths, [B].

        Session 0 is the one before the first timestamp, and the last one has the candidates.
        """
        sessions = np.arange(timestamp + 2)
        key = (users[:, None] * (NUM_TIMESTAMPS + 1) + sessions).astype(np.uint64)  # [B, S]
        is_there = uniforms(self._keys["session"], key) < SESSION_SHARE
        is_there[:, [0, -1]] = True
        # between 50 and 150, as the sum of two uniform numbers, where a normal one was published
        spread = sum(uniform_pairs(self._keys["length"], key)) - 1.0
        lengths = np.where(is_there, np.rint(SESSION_IDS * (1.0 + spread / 2)), 0).astype(np.int64)
        lengths[:, -1] = NUM_CANDIDATES
        flat = lengths.ravel()
        slots = np.arange(flat.sum()) - np.repeat(np.cumsum(flat) - flat, flat)
        counter = np.repeat(key.ravel() * np.uint64(MAX_SESSION_IDS), flat) + slots.astype(
            np.uint64
        )
        bits = random_bits(self._keys["item"], counter)
        choice = np.repeat(users, lengths.sum(axis=1)) * CATEGORIES_OF_USER + (
            bits >> np.uint64(62)
        ).view(np.int64)
        category = uniforms(self._keys["category"], choice.view(np.uint64)) * NUM_CATEGORIES
        released = np.maximum(sessions, 1) * SLICE_ITEMS
        released = np.repeat(np.tile(released, len(users)), flat)
        within = (bits & np.uint64(0xFFFFFFFF)).view(np.int64) * released >> 32
        items = category.astype(np.int64) * (SLICE_ITEMS * NUM_TIMESTAMPS) + within
        return items, lengths.sum(axis=1)
