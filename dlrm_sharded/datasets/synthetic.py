"""Multi-hot data with Zipf-skewed ids, generated where it is used."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split, profiled_table
from dlrm_sharded.datasets.counter_random import places, random_bits, stream_key, uniform_pairs
from dlrm_sharded.datasets.labels import PlantedLabels
from dlrm_sharded.errors import ConfigError, check_count, check_number
from dlrm_sharded.profiles import with_expected_profile
from dlrm_sharded.tables import Table
from dlrm_sharded.zipf import cached_zipf, scatter_ranks

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Which share of which batch."""

    split: Split
    index: int
    rank: int
    world_size: int


_BLOCK = 32_768  # ids per pass: the intermediate arrays stay in the cache
_MAX_PROFILED_IDS = 50_000_000  # a few seconds


class SyntheticDataset:
    """Batches in which every id is a pure function of (seed, split, table, sample, slot).

    So the samples are the same for any batch size, world size and resume point, and a rank
    generates its share alone: about 100 M ids/s on one core of a server CPU, labels included.

    Args:
        tables: their pooling factors are the mean number of ids per sample; a fraction is met by
            chance, so 2.3 is 2 ids for 70 % of the samples and 3 for the others.
        alpha: Zipf exponent of the ids; 0 is uniform, 0.9 fits Meta's production tables.
        pooling_spread: number of ids per sample evenly in pooling_factor * (1 -+ this), rounded
            by chance.
        max_rows: larger tables are cut to this, so that a published task fits a small machine.
        cache_batches: the first generated batches are kept for the later epochs, up to this
            number and to `cache_gib` per rank: an epoch that fits is generated once.
        pregenerate: a rank that asks for its first training batch waits until all that fit the
            cache are there, and the training loop does not wait for any of them.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        batch_size: int,
        num_train_batches: int,
        num_val_batches: int,
        num_dense: int = 13,
        alpha: float = 0.9,
        pooling_spread: float = 0.0,
        max_rows: int | None = None,
        seed: int = 0,
        cache_batches: int = 64,
        cache_gib: float = 1.0,
        pregenerate: bool = False,
    ) -> None:
        if not tables or len({table.name for table in tables}) < len(tables):
            raise ConfigError(
                "data.tables has no tables, or two of one name; "
                "give one table or more, each its name"
            )
        for key, count, least in (
            ("batch_size", batch_size, 1),
            ("data.num_train_batches", num_train_batches, 0),
            ("data.num_val_batches", num_val_batches, 0),
            ("data.num_dense", num_dense, 1),
            ("data.seed", seed, 0),
            ("data.cache_batches", cache_batches, 0),
        ):
            check_count(key, count, least=least)
        if max_rows is not None:
            check_count("data.max_rows", max_rows, least=1)
        check_number("data.alpha", alpha)
        check_number("data.pooling_spread", pooling_spread, most=1.0)
        check_number("data.cache_gib", cache_gib)
        self.batch_size = batch_size
        self.num_dense = num_dense
        self._specs = _cap_rows(tables, max_rows)
        self._alpha = alpha
        self._num_batches = {"train": num_train_batches, "val": num_val_batches}
        self._features = [
            _Feature(table, alpha=alpha, spread=pooling_spread, seed=seed) for table in self._specs
        ]
        self._labels = PlantedLabels(self._specs, num_dense=num_dense, seed=seed)
        self._lengths: dict[int, Tensor] = {}
        self._cache = _BatchCache(cache_batches, int(cache_gib * 2**30))
        self._to_pregenerate = num_train_batches if pregenerate else 0

    @functools.cached_property
    def tables(self) -> tuple[Table, ...]:
        """Measured on the first training batch, table by table.

        Batches of over 50 M ids get the profile that their distribution has in the mean instead.
        """
        num_ids = self.batch_size * sum(table.pooling_factor for table in self._specs)
        if num_ids > _MAX_PROFILED_IDS:
            log.info(
                "a batch has %.0f M ids, more than the %.0f M that are counted: the tables' "
                "profile is the expectation of their Zipf distribution, not a measurement",
                num_ids / 1e6,
                _MAX_PROFILED_IDS / 1e6,
            )
            return with_expected_profile(
                self._specs, batch_size=self.batch_size, exponent=self._alpha
            )
        profiled = []
        for spec, feature in zip(self._specs, self._features, strict=True):
            lengths = feature.lengths("train", 0, self.batch_size)
            ids = np.empty(lengths.sum(), dtype=np.int32)
            feature.write_ids(ids, "train", 0, lengths)
            profiled.append(
                profiled_table(
                    spec.name,
                    spec.num_embeddings,
                    spec.embedding_dim,
                    ids=torch.from_numpy(ids),
                    num_samples=self.batch_size,
                )
            )
        return tuple(profiled)

    def num_batches(self, split: Split) -> int:
        return self._num_batches[split]

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        if not 0 <= index < self._num_batches[split]:
            raise IndexError(f"{split} batch {index} of {self._num_batches[split]}")
        if split == "train" and self._to_pregenerate:
            self._pregenerate(rank, world_size)
        place = _Place(split, index, rank, world_size)
        return self._cache.get(place) or self._generate(place)[0]

    def _pregenerate(self, rank: int, world_size: int) -> None:
        """Generate training batches until the cache is full."""
        started = time.perf_counter()
        num_batches, self._to_pregenerate = self._to_pregenerate, 0
        for index in range(num_batches):
            _, is_kept = self._generate(_Place("train", index, rank, world_size))
            if not is_kept:
                num_batches = index
                break
        log.info(
            "%d of %d training batches generated ahead in %.1f s",
            num_batches,
            self._num_batches["train"],
            time.perf_counter() - started,
        )

    def _generate(self, place: _Place) -> tuple[Batch, bool]:
        """A rank's share of a batch, and whether the cache keeps it."""
        num_samples = self.batch_size // place.world_size
        first = place.index * self.batch_size + place.rank * num_samples
        batch = self._samples(place.split, first, num_samples)
        return batch, self._cache.keep(place, batch)

    def _samples(self, split: Split, first: int, num_samples: int) -> Batch:
        """Samples number `first`, `first` + 1, ... of the split."""
        lengths = self._constant_lengths(num_samples)
        if not all(feature.is_constant for feature in self._features):
            lengths = lengths.clone()
        per_feature = lengths.view(len(self._features), num_samples).numpy()
        for feature, row in zip(self._features, per_feature, strict=True):
            if not feature.is_constant:
                row[:] = feature.lengths(split, first, num_samples)
        length_per_key = per_feature.sum(axis=1, dtype=np.int64)
        offset_per_key = np.concatenate([[0], np.cumsum(length_per_key)])
        values = np.empty(offset_per_key[-1], dtype=np.int32)
        for i, feature in enumerate(self._features):
            ids = values[offset_per_key[i] : offset_per_key[i + 1]]
            feature.write_ids(ids, split, first, per_feature[i])
        sparse = KeyedJaggedTensor(
            keys=[table.name for table in self._specs],
            values=torch.from_numpy(values),
            lengths=lengths,
            stride=num_samples,
            # known here without a pass over the lengths, nor a wait for the device
            length_per_key=length_per_key.tolist(),
            offset_per_key=offset_per_key.tolist(),
        )
        dense = self._labels.dense(split, first, num_samples)
        return Batch(dense, sparse, self._labels.labels(split, first, dense, sparse))

    def _constant_lengths(self, num_samples: int) -> Tensor:
        """[T * b] int32, right for the features that have the same length for all samples."""
        if num_samples not in self._lengths:
            pooling = torch.tensor([feature.min_length for feature in self._features])
            self._lengths[num_samples] = pooling.int().repeat_interleave(num_samples)
        return self._lengths[num_samples]


class _Feature:
    """The ids of one table."""

    def __init__(self, table: Table, *, alpha: float, spread: float, seed: int) -> None:
        self._table = table
        self._spread = spread
        self.min_length = int(table.pooling_factor * (1.0 - spread))
        self.is_constant = spread == 0.0 and table.pooling_factor == self.min_length
        # sample s has its ids at the places s * _slots ... of the table's stream
        self._slots = self.min_length
        if not self.is_constant:
            self._slots = int(table.pooling_factor * (1.0 + spread)) + 1
        self._zipf = cached_zipf(table.num_embeddings, alpha)
        self._shift = stream_key(seed, "rows", table.name)
        self._keys = {
            (split, what): stream_key(seed, split, what, table.name)
            for split in ("train", "val")
            for what in ("ids", "lengths")
        }

    def lengths(self, split: Split, first: int, num_samples: int) -> NDArray[np.int32]:
        """[B], ids of the samples from number `first` on."""
        if self.is_constant:
            return np.full(num_samples, self.min_length, dtype=np.int32)
        where, rounding = uniform_pairs(self._keys[split, "lengths"], places(first, num_samples))
        mean = self._table.pooling_factor * (1.0 + self._spread * (2.0 * where - 1.0))
        return (mean + rounding).astype(np.int32)

    def write_ids(
        self, out: NDArray[np.int32], split: Split, first: int, lengths: NDArray[np.int32]
    ) -> None:
        """Fill `out`, [sum of lengths], with the ids of the samples from number `first` on."""
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        samples_per_block = max(1, _BLOCK // max(1, self._slots))
        for begin in range(0, lengths.size, samples_per_block):
            end = min(begin + samples_per_block, lengths.size)
            place = self._places(first + begin, lengths[begin:end])
            ranks = self._zipf.ranks(random_bits(self._keys[split, "ids"], place))
            out[offsets[begin] : offsets[end]] = scatter_ranks(
                ranks, self._table.num_embeddings, self._shift
            )

    def _places(self, first: int, lengths: NDArray[np.int32]) -> NDArray[np.uint64]:
        if self.is_constant:
            return places(first * self._slots, lengths.size * self._slots)
        ends = np.cumsum(lengths, dtype=np.int64)
        first_slots = np.arange(first, first + lengths.size, dtype=np.int64) * self._slots
        place = np.repeat(first_slots - (ends - lengths), lengths)
        place += np.arange(place.size)
        return place.view(np.uint64)


class _BatchCache:
    """The first batches that come, as far as they fit; none makes room for another.

    In an epoch that does not fit, the least recently used batch is the one that comes next.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._batches_left = max_batches
        self._bytes_left = max_bytes
        self._batches: dict[_Place, Batch] = {}

    def get(self, place: _Place) -> Batch | None:
        return self._batches.get(place)

    def keep(self, place: _Place, batch: Batch) -> bool:
        """Keep the batch if there is room; whether there was."""
        tensors = (batch.dense_features, batch.labels, batch.sparse_features.values())
        num_bytes = sum(t.nbytes for t in tensors) + batch.sparse_features.lengths().nbytes
        has_room = self._batches_left > 0 and num_bytes <= self._bytes_left
        if has_room:
            self._batches_left -= 1
            self._bytes_left -= num_bytes
            self._batches[place] = batch
        return has_room


def _cap_rows(tables: Sequence[Table], max_rows: int | None) -> tuple[Table, ...]:
    if max_rows is None:
        return tuple(tables)
    capped = tuple(
        dataclasses.replace(table, num_embeddings=min(table.num_embeddings, max_rows))
        for table in tables
    )
    num_cut = sum(table.num_embeddings > max_rows for table in tables)
    if num_cut:
        log.warning(
            "max_rows=%s cuts %d of %d tables: %.2f GiB instead of %.2f GiB of fp32 weights",
            f"{max_rows:,}",
            num_cut,
            len(tables),
            _weights_gib(capped),
            _weights_gib(tables),
        )
    return capped


def _weights_gib(tables: Sequence[Table]) -> float:
    return sum(4 * table.num_embeddings * table.embedding_dim for table in tables) / 2**30
