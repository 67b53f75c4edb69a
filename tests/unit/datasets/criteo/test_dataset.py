"""Batches of converted data."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.criteo import CriteoDataset, CriteoSource
from dlrm_sharded.datasets.criteo_sample import write_criteo_sample
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.testing import check_dataset
from tests.unit.datasets.criteo.reference import NUM_ROWS, num_embeddings, reference


def dataset(folder: Path, **options) -> CriteoDataset:
    return CriteoDataset(folder, embedding_dim=8, **options)


def test_batches_are_the_rows_in_order(sample, blocks_dir):
    data = dataset(blocks_dir, batch_size=48)
    labels, dense, ids = reference([sample], num_val=NUM_ROWS // 7, min_count=3)
    assert data.num_dense == 13
    for split, first, num_batches in (("train", 0, 600 // 48), ("val", 600, 100 // 48)):
        assert data.num_batches(split) == num_batches
        for index in range(num_batches):
            batch = data.batch(split, index, rank=0, world_size=1)
            rows = slice(first + index * 48, first + index * 48 + 48)
            assert np.array_equal(batch.labels, labels[rows])
            assert batch.labels.dtype == torch.float32
            np.testing.assert_allclose(batch.dense_features, dense[rows], rtol=1e-6)
            assert np.array_equal(batch.sparse_features.values(), ids[:, rows].reshape(-1))
        with pytest.raises(IndexError, match=f"{split} batch {num_batches} of {num_batches}"):
            data.batch(split, num_batches, rank=0, world_size=1)


def test_the_kjt_has_one_id_per_feature_and_sample(blocks_dir):
    data = dataset(blocks_dir, batch_size=48)
    kjt = data.batch("train", 1, rank=1, world_size=2).sparse_features
    assert kjt.keys() == [f"cat_{i}" for i in range(26)]
    assert kjt.stride() == 24
    assert kjt.lengths().tolist() == [1] * (26 * 24)
    assert kjt.offsets().tolist() == list(range(26 * 24 + 1))
    assert kjt.offset_per_key() == list(range(0, 26 * 24 + 1, 24))
    plain = type(kjt).from_lengths_sync(kjt.keys(), kjt.values(), kjt.lengths().clone())
    for key, jagged in plain.to_dict().items():
        assert torch.equal(jagged.values(), kjt[key].values())
    for ours, theirs in zip(kjt.split([20, 6]), plain.split([20, 6]), strict=True):
        assert torch.equal(ours.values(), theirs.values())
        assert torch.equal(ours.lengths(), theirs.lengths())


@pytest.mark.parametrize("batch_size", [12, 32 * 3, 32 * 6, 30])
def test_is_a_dataset(blocks_dir, batch_size):
    check_dataset(lambda: dataset(blocks_dir, batch_size=batch_size))


def test_tables_are_profiled_on_the_data(blocks_dir):
    tables = dataset(blocks_dir, batch_size=100).tables
    blocks = BlockReader(blocks_dir)
    assert [table.name for table in tables] == [f"cat_{i}" for i in range(26)]
    assert [t.num_embeddings for t in tables] == list(num_embeddings(blocks))
    assert {(t.embedding_dim, t.pooling_factor) for t in tables} == {(8, 1.0)}
    uses = np.unique(blocks.rows(0, 100).ids[0], return_counts=True)[1]
    assert tables[0].reuse_histogram[0] == pytest.approx((uses == 1).mean())


def test_converts_at_the_first_use_and_not_again(tmp_path, sample):
    source = CriteoSource([str(sample)])
    data = dataset(tmp_path / "b", batch_size=50, source=source)
    assert not (tmp_path / "b").exists()
    data.num_batches("train")
    made = (tmp_path / "b/manifest.json").stat().st_mtime_ns
    dataset(tmp_path / "b", batch_size=50, source=source).num_batches("train")
    assert (tmp_path / "b/manifest.json").stat().st_mtime_ns == made


def test_converted_data_of_another_source_is_refused(tmp_path, sample):
    mine = tmp_path / "train.txt"
    mine.write_bytes(sample.read_bytes())

    def prepare(path=mine, **options):
        source = CriteoSource(str(path), **options)
        dataset(tmp_path / "b", batch_size=50, source=source).num_batches("train")

    prepare()
    with pytest.raises(DataError, match=r"min_count: 3, now 7.*blocks_dir"):
        prepare(min_count=7)
    other = tmp_path / "other.txt"
    write_criteo_sample(other, num_rows=20)
    with pytest.raises(DataError, match=r"train_files: .*train.txt.*, now .*other.txt"):
        prepare(other)
    mine.unlink()
    prepare()
