from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets import synthetic
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.testing import check_dataset
from tests.unit.datasets.batches import ids_of, whole_batch
from tests.unit.datasets.test_stream import plain_histogram

TABLES = (
    Table("many", 5_000, 8, 12.0),
    Table("fraction", 300, 4, 2.3),
    Table("rare", 100_000, 16, 0.4),
    Table("one_row", 1, 4, 1.0),
    Table("never", 10, 4, 0.0),
    Table("few", 7, 4, 3.0),
)


def dataset(tables: tuple[Table, ...] = TABLES, **changes: Any) -> SyntheticDataset:
    arguments = {"batch_size": 48, "num_train_batches": 6, "num_val_batches": 2, "seed": 3}
    return SyntheticDataset(tables, **{**arguments, **changes})


def assert_same(left: Batch, right: Batch) -> None:
    assert torch.equal(left.dense_features, right.dense_features)
    assert torch.equal(left.labels, right.labels)
    assert torch.equal(left.sparse_features.values(), right.sparse_features.values())
    assert torch.equal(left.sparse_features.lengths(), right.sparse_features.lengths())


def test_mean_number_of_ids_is_the_pooling_factor():
    data = dataset(batch_size=20_000)
    sparse = whole_batch(data).sparse_features
    lengths = sparse.lengths().view(len(TABLES), -1).double()
    for table, row in zip(TABLES, lengths, strict=True):
        assert row.mean().item() == pytest.approx(table.pooling_factor, rel=0.03, abs=1e-9)
        assert row.max() <= table.pooling_factor + 1
    assert set(lengths[1].tolist()) == {2.0, 3.0}
    assert lengths[0].unique().tolist() == [12.0]


def test_shapes_types_and_metadata():
    batch = dataset(num_dense=5).batch("train", 1, rank=1, world_size=2)
    sparse = batch.sparse_features
    assert batch.dense_features.shape == (24, 5)
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    assert batch.labels.shape == (24,)
    assert set(batch.labels.tolist()) <= {0.0, 1.0}
    assert sparse.keys() == [table.name for table in TABLES]
    assert (sparse.values().dtype, sparse.lengths().dtype) == (torch.int32, torch.int32)
    plain = KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=sparse.lengths())
    assert (sparse.stride(), plain.stride()) == (24, 24)
    assert sparse.length_per_key() == plain.length_per_key()
    assert sparse.offset_per_key() == plain.offset_per_key()


def test_ids_are_in_range_and_skewed():
    data = dataset(batch_size=5_000)
    ids = ids_of(whole_batch(data))
    for table, samples in zip(TABLES, ids, strict=True):
        assert all(0 <= i < table.num_embeddings for sample in samples for i in sample)
    popular = Counter(i for sample in ids[0] for i in sample).most_common(2)
    share = popular[0][1] / 60_000
    expected = 1 / (np.arange(1, 5_001) ** -0.9).sum()
    assert share == pytest.approx(expected, rel=0.05)
    assert popular[0][1] / popular[1][1] == pytest.approx(2**0.9, rel=0.05)


@pytest.mark.parametrize("pregenerate", [False, True])
def test_is_a_dataset(pregenerate):
    check_dataset(lambda: dataset(pregenerate=pregenerate), world_sizes=(1, 2, 3, 8))


def test_batch_size_does_not_change_the_samples():
    small, large = dataset(batch_size=24, num_train_batches=12), dataset()
    parts = [whole_batch(small, i) for i in (4, 5)]
    whole = whole_batch(large, 2)
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    ids = [ids_of(part) for part in parts]
    assert ids_of(whole) == [ids[0][t] + ids[1][t] for t in range(len(TABLES))]


def test_passes_do_not_change_the_ids(monkeypatch):
    whole = whole_batch(dataset())
    monkeypatch.setattr(synthetic, "IDS_PER_PASS", 5)
    assert_same(whole, whole_batch(dataset()))


def test_seed_place_and_split_decide_the_ids():
    values = whole_batch(dataset()).sparse_features.values()
    for other in (
        whole_batch(dataset(seed=4)),
        whole_batch(dataset(), 1),
        whole_batch(dataset(), split="val"),
    ):
        assert not torch.equal(values[:100], other.sparse_features.values()[:100])


def test_profile_is_what_counting_gives():
    data = dataset(batch_size=2_000)
    batch = whole_batch(data)
    for table, samples in zip(data.tables, ids_of(batch), strict=True):
        ids = [i for sample in samples for i in sample]
        assert table.pooling_factor == pytest.approx(len(ids) / 2_000)
        assert table.reuse_histogram == pytest.approx(plain_histogram(ids))
    assert data.tables is data.tables
    assert [t.embedding_dim for t in data.tables] == [t.embedding_dim for t in TABLES]


def test_max_rows_cuts_and_says_so_once(caplog):
    tables = (Table("large", 2**22, 64, 1.0), Table("small", 100, 4, 1.0))
    data = dataset(tables, max_rows=2**20)
    assert [table.num_embeddings for table in data.tables] == [2**20, 100]
    assert len(caplog.records) == 1
    assert "cuts 1 of 2 tables: 0.25 GiB instead of 1.00 GiB" in caplog.text
    ids = whole_batch(data).sparse_features.values()
    assert ids.max() < 2**20


def test_pregenerating_changes_when_and_not_what():
    pregenerated = dataset(pregenerate=True, cache_batches=3)
    pregenerated.batch("train", 5, rank=1, world_size=2)
    assert kept_batches(pregenerated, rank=1, world_size=2) == [0, 1, 2]
    on_demand = dataset(cache_batches=3)
    on_demand.batch("train", 5, rank=1, world_size=2)
    assert kept_batches(on_demand, rank=1, world_size=2) == [0, 1, 5]
    for index in range(6):
        assert_same(
            pregenerated.batch("train", index, rank=1, world_size=2),
            on_demand.batch("train", index, rank=1, world_size=2),
        )


def kept_batches(data: SyntheticDataset, *, rank: int = 0, world_size: int = 1) -> list[int]:
    """Ask twice for all training batches, and return which ones were not generated again."""
    first, second = (
        [data.batch("train", i, rank=rank, world_size=world_size) for i in range(6)]
        for _ in range(2)
    )
    for left, right in zip(first, second, strict=True):
        assert_same(left, right)
    return [i for i in range(6) if first[i] is second[i]]


def test_cache_keeps_the_first_batches_within_its_limits():
    assert kept_batches(dataset()) == list(range(6))
    assert kept_batches(dataset(cache_batches=2)) == [0, 1]
    assert kept_batches(dataset(cache_batches=0)) == kept_batches(dataset(cache_gib=0.0)) == []
    assert len(kept_batches(dataset(cache_gib=20_000 / 2**30))) in (1, 2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_batches": 3},
        {"cache_batches": 0},
        {"cache_gib": 20_000 / 2**30},
        {"pregenerate": True, "num_val_batches": 0},
    ],
    ids=str,
)
def test_cached_bytes_are_those_of_the_batches_that_it_keeps(changes):
    """Up to the number of ids, which is random."""
    data = dataset(**changes)
    num_val_batches = data.num_batches("val")
    expected = data.cached_bytes(num_train_batches=6, num_val_batches=num_val_batches, world_size=2)
    for split in ("train", "val"):
        for index in range(data.num_batches(split)):
            data.batch(split, index, rank=0, world_size=2)
    storages = {}
    for batch in data._cache._batches.values():
        sparse = batch.sparse_features
        for tensor in (batch.dense_features, batch.labels, sparse.values(), sparse.lengths()):
            storages[tensor.data_ptr()] = tensor.nbytes
    assert expected == pytest.approx(sum(storages.values()), rel=0.05)
