from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_sharded.datasets.base import BatchStream, reuse_histogram
from dlrm_sharded.datasets.dlrm_datasets import DlrmDatasets
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.testing import check_dataset
from tests.unit.datasets.batches import ids_of, whole_batch

NUM_TABLES, NUM_SAMPLES, BATCH_SIZE = 5, 250, 24


def content() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 6, (NUM_TABLES, NUM_SAMPLES), generator=generator)
    lengths[3] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    indices = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    return indices, offsets, lengths


def bag(table: int, sample: int) -> list[int]:
    indices, offsets, _ = content()
    place = table * NUM_SAMPLES + sample
    return indices[offsets[place] : offsets[place + 1]].tolist()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.save(content(), tmp_path / "data.pt")
    return tmp_path / "data.pt"


@pytest.fixture
def packed(plain: Path) -> Path:
    path = plain.with_suffix(".pt.gz")
    path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


def dataset(path: Path, **changes: Any) -> DlrmDatasets:
    return DlrmDatasets(path, **{"batch_size": BATCH_SIZE, "embedding_dim": 8, **changes})


def test_batches_are_the_samples_of_the_file_in_order(plain):
    data = dataset(plain, val_share=0.2)
    assert (data.num_batches("train"), data.num_batches("val")) == (8, 2)
    for split, index, first in (("train", 0, 0), ("train", 7, 168), ("val", 1, 216)):
        batch = whole_batch(data, index, split)
        samples = range(first, first + BATCH_SIZE)
        assert ids_of(batch) == [[bag(t, s) for s in samples] for t in range(NUM_TABLES)]
        assert batch.sparse_features.values().dtype == torch.int32
        assert batch.dense_features.shape == (BATCH_SIZE, 13)
        assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_is_a_dataset(plain):
    check_dataset(lambda: dataset(plain, val_share=0.2), world_sizes=(1, 2, 3, 8))


def test_gz_equals_plain(plain, packed):
    streams = [BatchStream(dataset(path), "train", shuffle_seed=1) for path in (plain, packed)]
    for left, right in zip(*streams, strict=True):
        assert ids_of(left) == ids_of(right)
        assert torch.equal(left.labels, right.labels)
    assert dataset(plain).tables == dataset(packed).tables


def test_tables_are_profiled_on_the_first_batch(plain):
    data = dataset(plain)
    indices, offsets, lengths = content()
    for t, table in enumerate(data.tables):
        all_ids = indices[offsets[t * NUM_SAMPLES] : offsets[(t + 1) * NUM_SAMPLES]]
        first = torch.tensor([i for s in range(BATCH_SIZE) for i in bag(t, s)])
        assert table.num_embeddings == (int(all_ids.max()) + 1 if all_ids.numel() else 1)
        assert table.pooling_factor == pytest.approx(lengths[t, :BATCH_SIZE].double().mean().item())
        assert table.reuse_histogram == reuse_histogram(first)


def test_some_tables_by_their_place_in_the_file(plain):
    data = dataset(plain, table_ids=[4, 1])
    batch = whole_batch(data)
    assert batch.sparse_features.keys() == ["t004", "t001"]
    assert ids_of(batch) == [[bag(t, s) for s in range(BATCH_SIZE)] for t in (4, 1)]
    assert batch.sparse_features.offset_per_key()[-1] == batch.sparse_features.values().numel()


@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_file(request, form, share):
    path = request.getfixturevalue(form)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match="truncated"):
        dataset(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, o, n: (i, o), "three tensors"),
        (lambda i, o, n: {"indices": i}, "three tensors"),
        (lambda i, o, n: (i, o, n.reshape(-1)), r"expected \[N\]"),
        (lambda i, o, n: (i, o[:-1], n), r"expected \[N\]"),
        (lambda i, o, n: (i[:-1], o, n), r"sums of the lengths"),
        (lambda i, o, n: (i, o, n.flip(1)), r"sums of the lengths"),
    ],
    ids=["two", "dict", "flat_lengths", "short_offsets", "short_indices", "other_lengths"],
)
def test_malformed_content(tmp_path, change, message):
    torch.save(change(*content()), tmp_path / "data.pt")
    with pytest.raises(DataError, match=message):
        dataset(tmp_path / "data.pt")
