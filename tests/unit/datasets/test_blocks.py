from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dlrm_sharded.datasets.blocks import MANIFEST, BlockReader, BlockWriter
from dlrm_sharded.files.errors import DataError

NUM_ROWS, NUM_TRAIN_ROWS, NUM_DENSE, BLOCK_ROWS = 50, 37, 3, 8
FEATURES = ("a", "b", "c", "d")


@pytest.fixture
def data() -> dict[str, npt.NDArray[np.generic]]:
    rng = np.random.default_rng(0)
    return {
        "dense": rng.standard_normal((NUM_ROWS, NUM_DENSE)).astype(np.float32),
        "ids": rng.integers(0, 2**31 - 1, (len(FEATURES), NUM_ROWS)).astype(np.int32),
        "labels": rng.integers(0, 2, NUM_ROWS).astype(np.uint8),
    }


def new_writer(folder: Path) -> BlockWriter:
    return BlockWriter(folder, num_dense=NUM_DENSE, feature_names=FEATURES, block_rows=BLOCK_ROWS)


def write(folder: Path, data: dict[str, npt.NDArray[np.generic]], *, piece_rows: int) -> None:
    folder.mkdir()
    with new_writer(folder) as writer:
        for start in range(0, NUM_ROWS, piece_rows):
            rows = slice(start, start + piece_rows)
            writer.append_samples(dense=data["dense"][rows], labels=data["labels"][rows])
        for start in range(0, NUM_ROWS, piece_rows):
            writer.append_ids(data["ids"][:, start : start + piece_rows])
        writer.finish(
            num_train_rows=NUM_TRAIN_ROWS, num_embeddings=(2**31 - 1,) * 4, source={"x": 1}
        )


@pytest.fixture
def folder(tmp_path: Path, data: dict[str, npt.NDArray[np.generic]]) -> Path:
    write(tmp_path / "blocks", data, piece_rows=11)
    return tmp_path / "blocks"


@pytest.mark.parametrize("piece_rows", [1, 7, 8, 16, 19, 50])
def test_written_in_any_pieces_the_files_are_the_same(tmp_path, folder, data, piece_rows):
    write(tmp_path / "other", data, piece_rows=piece_rows)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()


def test_the_files_are_plain_npy_with_the_documented_shapes(folder, data):
    ids = np.load(folder / "ids.npy")
    assert ids.shape == (7, len(FEATURES), BLOCK_ROWS)
    assert ids.dtype == np.int32
    assert np.load(folder / "dense.npy").shape == (7, BLOCK_ROWS, NUM_DENSE)
    assert np.load(folder / "labels.npy").shape == (7, BLOCK_ROWS)
    assert np.array_equal(ids[1], data["ids"][:, 8:16])
    assert not ids[-1, :, 2:].any()


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 8), (8, 16), (0, 50), (0, 1), (49, 50), (3, 6), (5, 12), (7, 33)]
)
def test_rows_wherever_the_blocks_begin(folder, data, start, stop):
    rows = BlockReader(folder).rows(start, stop)
    assert np.array_equal(rows.dense, data["dense"][start:stop])
    assert np.array_equal(rows.ids, data["ids"][:, start:stop])
    assert np.array_equal(rows.labels, data["labels"][start:stop])
    dtypes = rows.dense.dtype, rows.ids.dtype, rows.labels.dtype
    assert dtypes == (np.float32, np.int32, np.float32)
    assert rows.ids.flags.c_contiguous
    assert rows.ids.flags.writeable
    assert rows.ids.flags.owndata


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 4), (40, 51)])
def test_rows_that_are_not_there(folder, start, stop):
    with pytest.raises(IndexError):
        BlockReader(folder).rows(start, stop)


def test_the_manifest_says_what_was_written(folder):
    manifest = BlockReader(folder).manifest
    assert (manifest.num_rows, manifest.num_train_rows) == (NUM_ROWS, NUM_TRAIN_ROWS)
    assert manifest.feature_names == FEATURES
    assert manifest.source == {"x": 1}


@pytest.mark.parametrize("name", ["ids.npy", "dense.npy", "labels.npy"])
def test_a_truncated_file_is_noticed_at_open(folder, name):
    path = folder / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=rf"{name} should have {size:,} B, but has {size - 4:,} B"):
        BlockReader(folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{name}.*has 0 B.*convert again"):
        BlockReader(folder)


def test_no_manifest_is_no_dataset(tmp_path, folder):
    (folder / MANIFEST).unlink()
    for path in (folder, tmp_path / "nothing", folder / "ids.npy"):
        with pytest.raises(DataError, match="is not a folder of blocks"):
            BlockReader(path)


def test_a_writer_that_was_not_finished_leaves_no_manifest(tmp_path, data):
    with new_writer(tmp_path) as writer:
        writer.append_samples(dense=data["dense"], labels=data["labels"])
    with pytest.raises(DataError, match="is not a folder of blocks"):
        BlockReader(tmp_path)
