import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_sharded.datasets.base import reuse_histogram
from dlrm_sharded.datasets.multihot_criteo import MultiHotCriteo
from dlrm_sharded.datasets.presets import mlperf_dcnv2
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.testing import check_dataset
from tests.unit.damage import cut_off
from tests.unit.datasets.batches import whole_batch
from tests.unit.datasets.mlperf_files import DAY_ROWS, IDS, write_days

BATCH_SIZE = 12
NPZ = "day_1_sparse_multi_hot.npz"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mlperf")
    write_days(folder)
    return folder


@pytest.fixture
def own_files(files, tmp_path) -> Path:
    return shutil.copytree(files, tmp_path / "own")


def dataset(path: Path, **changes: Any) -> MultiHotCriteo:
    options = {"batch_size": BATCH_SIZE, "embedding_dim": 8, "days": len(DAY_ROWS), **changes}
    return MultiHotCriteo(path, **options)


def plain(path: Path, kind: str) -> Any:
    """The rows of all days, read by numpy."""
    days = [np.load(path / f"day_{day}_{kind}") for day in range(len(DAY_ROWS))]
    if kind.endswith("npy"):
        return np.concatenate(days)
    return [np.concatenate([day[str(i)] for day in days]) for i in range(26)]


@pytest.mark.parametrize(
    ("split", "half", "start", "stop"),
    [("train", "first", 0, 61), ("val", "first", 61, 74), ("val", "second", 74, 86)],
    ids=["train", "first", "second"],
)
def test_batches_are_rows_of_all_days_in_order(files, split, half, start, stop):
    data = dataset(files, val_half=half)
    assert data.num_batches(split) == (stop - start) // BATCH_SIZE
    dense, labels = plain(files, "dense.npy"), plain(files, "labels.npy")
    ids = plain(files, "sparse_multi_hot.npz")
    for index in range(data.num_batches(split)):
        rows = slice(start + index * BATCH_SIZE, start + (index + 1) * BATCH_SIZE)
        batch = whole_batch(data, index, split)
        np.testing.assert_array_equal(batch.dense_features, dense[rows])
        np.testing.assert_array_equal(batch.labels, labels[rows, 0])
        features = batch.sparse_features.to_dict()
        assert [*features] == [table.name for table in data.tables]
        for feature, column, num in zip(features.values(), ids, IDS, strict=True):
            assert feature.lengths().tolist() == [num] * BATCH_SIZE
            np.testing.assert_array_equal(feature.values().view(-1, num), column[rows])
        assert batch.sparse_features.values().dtype == torch.int32


def test_is_a_dataset(files):
    check_dataset(lambda: dataset(files), world_sizes=(1, 2, 3, 4))


def test_tables_are_mlperfs_with_the_profile_of_the_first_batch(files):
    data = dataset(files)
    ids = plain(files, "sparse_multi_hot.npz")
    assert data.ids_per_sample == {f"cat_{i}": num for i, num in enumerate(IDS)}
    for table, published, column in zip(data.tables, mlperf_dcnv2(8), ids, strict=True):
        shapes = [(t.name, t.num_embeddings, t.embedding_dim) for t in (table, published)]
        assert shapes[0] == shapes[1]
        assert table.pooling_factor == published.pooling_factor
        first = torch.from_numpy(column[:BATCH_SIZE].reshape(-1))
        assert table.reuse_histogram == reuse_histogram(first)


def test_ids_are_taken_modulo_the_rows_of_tables_that_are_cut(files):
    data = dataset(files, max_rows=7)
    assert max(table.num_embeddings for table in data.tables) == 7
    cut, whole = (whole_batch(d, 3).sparse_features.to_dict() for d in (data, dataset(files)))
    for table in data.tables:
        expected = whole[table.name].values() % table.num_embeddings
        assert cut[table.name].values().tolist() == expected.tolist()


def test_a_batch_may_be_all_of_the_training_data(files):
    assert dataset(files, batch_size=61).num_batches("train") == 1
    assert dataset(files, batch_size=1).num_batches("train") == 61


def rewrite(change: Any, name: str = NPZ) -> Any:
    """Write the arrays of a file again with a change."""

    def damage(folder: Path) -> None:
        path = folder / name
        if name.endswith("npy"):
            return np.save(path, change(np.load(path)))
        with np.load(path) as loaded:
            arrays = change(dict(loaded))
        return np.savez(path, **arrays)

    return damage


def compress(folder: Path) -> None:
    with np.load(folder / NPZ) as loaded:
        arrays = dict(loaded)
    np.savez_compressed(folder / NPZ, **arrays)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "day_3_dense.npy").unlink(), r"day_3_dense.npy is missing; set data.path"),
        (lambda d: (d / "day_3_labels.npy").unlink(), r"day_3_labels.npy is missing.*copy_labels"),
        (lambda d: (d / NPZ).unlink(), rf"{NPZ} is missing"),
        (lambda d: cut_off(d / "day_0_dense.npy"), "day_0_dense.npy cannot be read.*copy it again"),
        (lambda d: cut_off(d / "day_4_labels.npy"), "day_4_labels.npy cannot be read"),
        (lambda d: cut_off(d / NPZ), rf"{NPZ} cannot be read.*copy it again"),
        (lambda d: (d / NPZ).write_bytes(b""), rf"{NPZ} cannot be read"),
        (lambda d: (d / "day_0_dense.npy").write_bytes(b"a" * 99), "day_0_dense.npy cannot be"),
        (compress, rf"{NPZ} cannot be read: it is compressed.*numpy.savez"),
        (rewrite(lambda a: {k: a[k] for k in a if k != "25"}), rf"{NPZ} cannot be read.*25.npy"),
        (rewrite(lambda a: a | {"3": a["3"][:-1]}), rf"{NPZ} has \[17, 2\] int32 .* \[18, 2\]"),
        (rewrite(lambda a: a | {"3": a["3"][:, :1]}), r"day_1 has \[.*\] ids a sample .* day_0 \["),
        (rewrite(lambda a: a | {"3": a["3"].astype(np.int64)}), r"has \[18, 2\] int64 .* int32"),
        (rewrite(lambda a: a | {"3": a["3"][:, 0]}), r"shape \[18\], which is no matrix"),
        (rewrite(lambda a: a[:, :12], "day_0_dense.npy"), r"has \[31, 12\] .* \[31, 13\] float32"),
        (rewrite(lambda a: a[1:], "day_1_labels.npy"), r"day_1_labels.npy has \[17, 1\] int32"),
    ],
)
def test_damaged_files_are_named(own_files, damage, message):
    damage(own_files)
    with pytest.raises(DataError, match=f"(?s){message}"):
        dataset(own_files).batch("train", 0, rank=0, world_size=1)


def test_a_header_of_a_member_that_is_damaged(own_files):
    """Its place in the file is known from the directory at the end."""
    content = bytearray((own_files / NPZ).read_bytes())
    content[26:30] = b"\xff\xff\xff\xff"
    (own_files / NPZ).write_bytes(content)
    with pytest.raises(DataError, match=f"{NPZ} cannot be read"):
        dataset(own_files).num_batches("val")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 62}, "batch_size is 62, but .* has only 61 samples"),
        ({"batch_size": 0}, "batch_size is 0; it must be an integer >= 1"),
        ({"days": 1}, "data.days is 1; it must be an integer from 2 to 24"),
        ({"val_half": "third"}, "data.val_half is 'third'; known: first, second"),
        ({"max_rows": 0}, "data.max_rows is 0"),
        ({"path": ""}, "data.path is ''"),
        ({"embedding_dim": 6}, "embedding_dim is 6"),
    ],
    ids=str,
)
def test_wrong_options(files, options, message):
    with pytest.raises(ConfigError, match=message):
        assert dataset(**{"path": files, **options}).tables
