"""`data=table` serves what the files say, however many files, folders and ranks there are."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.schema import read_schema, schema_yaml
from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.testing import check_dataset
from tests.unit.datasets.tables import Files, click_log, criteo_files, expected_samples, wide_log

BATCH_SIZE = 12


def dataset(log: Files, folder: Path, **options: Any) -> TableDataset:
    options = {"files": log.paths, "blocks_dir": folder / "blocks", "block_rows": 50} | options
    return TableDataset(schema=log.schema, batch_size=BATCH_SIZE, **options)


def check_samples(
    data: TableDataset, files: Files, split: Split, first: int, num_train: int, world_size: int = 1
) -> None:
    """Compare all batches of a split with the rows from `first` on."""
    dense, ids = expected_samples(files.rows, files.schema, num_train)
    for index in range(data.num_batches(split)):
        for rank in range(world_size):
            batch = data.batch(split, index, rank=rank, world_size=world_size)
            count = BATCH_SIZE // world_size
            start = first + index * BATCH_SIZE + rank * count
            samples = slice(start, start + count)
            labels = [int(label) for label in files.rows[files.schema["label"]][samples]]
            assert batch.labels.tolist() == labels
            np.testing.assert_allclose(
                batch.dense_features.numpy(), dense[samples], rtol=1e-5, atol=1e-6
            )
            assert set(batch.sparse_features.keys()) == set(ids)
            for name in ids:
                feature = batch.sparse_features[name]
                bounds = np.cumsum([0, *feature.lengths().tolist()]).tolist()
                values = feature.values().tolist()
                found = [values[begin:end] for begin, end in itertools.pairwise(bounds)]
                assert found == ids[name][samples], name


@pytest.mark.parametrize("make", [criteo_files, click_log, wide_log])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_are_what_the_files_say(
    tmp_path: Path, make: Callable[[Path], Files], world_size: int
) -> None:
    files = make(tmp_path)
    data = dataset(files, tmp_path, val_share=0.25)
    assert (data.num_batches("train"), data.num_batches("val")) == (450 // 12, 150 // 12)
    check_samples(data, files, "train", 0, 450, world_size)
    check_samples(data, files, "val", 450, 450, world_size)
    _, ids = expected_samples(files.rows, files.schema, 450)
    for table in data.tables:
        largest = max(row for name in table.feature_names for one in ids[name] for row in one)
        assert largest < table.num_embeddings


@pytest.mark.parametrize("make", [click_log, wide_log])
def test_is_a_dataset(tmp_path: Path, make: Callable[[Path], Files]) -> None:
    files = make(tmp_path)
    check_dataset(lambda: dataset(files, tmp_path))


def test_tables_are_those_of_the_schema(tmp_path: Path) -> None:
    files = click_log(tmp_path)
    user, item, weekday = sorted(
        dataset(files, tmp_path, embedding_dim=4).tables,
        key=lambda t: ["user", "item", "weekday"].index(t.name),
    )
    assert (user.embedding_dim, item.embedding_dim, weekday.embedding_dim) == (8, 4, 4)
    assert (item.feature_names, item.num_features) == (("item", "seen"), 2)
    assert user.num_embeddings <= 30
    assert weekday.num_embeddings == 7


@pytest.mark.parametrize(
    ("files", "validation"),
    [
        (["clicks-*.parquet"], ["clicks-2.parquet"]),
        (["."], ["clicks-2*"]),
        (["clicks-0.parquet", "clicks-1.parquet"], ["clicks-2.parquet"]),
        (["clicks-0.parquet", "folder"], ["link.parquet"]),
    ],
)
def test_validation_files_do_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], validation: list[str]
) -> None:
    """Globs, folders and links may match them, relative or not."""
    (tmp_path / "data").mkdir()
    log = click_log(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    if "folder" in files:
        Path("folder").mkdir()
        Path("clicks-1.parquet").rename("folder/clicks-1.parquet")
        Path("folder/.hidden.parquet").write_text("not read")
        Path("folder/_SUCCESS").touch()
        Path("clicks-2.parquet").rename("folder/clicks-2.parquet")
        Path("link.parquet").symlink_to("folder/clicks-2.parquet")
    data = dataset(
        log,
        tmp_path,
        files=files,
        validation_files=[str(Path(one).absolute()) for one in validation],
    )
    assert data.num_batches("train") == 400 // BATCH_SIZE
    check_samples(data, log, "train", 0, 400)
    check_samples(data, log, "val", 400, 400)


def test_files_are_in_natural_order(tmp_path: Path) -> None:
    log = click_log(tmp_path, num_files=12)
    data = dataset(log, tmp_path, files=[str(tmp_path)], val_share=0)
    check_samples(data, log, "train", 0, 600)
    assert data.num_batches("val") == 0


def test_a_name_with_brackets_is_a_file(tmp_path: Path) -> None:
    log = click_log(tmp_path, num_files=1)
    path = Path(log.paths[0]).rename(tmp_path / "clicks[1].parquet")
    check_samples(dataset(log, tmp_path, files=str(path), val_share=0), log, "train", 0, 600)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "name files"),
        ([5], "must be a path"),
        (["none-*"], "is no file"),
        (["lost.parquet"], "lost.parquet is no file"),
        (["lost*"], "lost.parquet is no file"),
        (["clicks-0.parquet", "./clicks-0.parquet"], "twice"),
        (["clicks-0.parquet", "same.parquet"], "twice"),
        (["clicks-0.parquet", "clicks-0.parquet.gz"], "twice"),
    ],
)
def test_says_which_files_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[Any], words: str
) -> None:
    log = click_log(tmp_path, num_files=1)
    monkeypatch.chdir(tmp_path)
    Path("lost.parquet").symlink_to("nowhere.parquet")
    Path("same.parquet").symlink_to("clicks-0.parquet")
    Path("clicks-0.parquet.gz").touch()
    with pytest.raises((ConfigError, DataError), match=words):
        dataset(log, tmp_path, files=files).num_batches("train")
    assert not list(tmp_path.glob("blocks*"))


def test_each_choice_of_files_has_blocks_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = click_log(tmp_path)
    schema = tmp_path / "schema.yaml"
    schema.write_text(schema_yaml(read_schema(log.schema)))
    few, all_files = (
        TableDataset(files, str(schema), batch_size=128, val_share=0.2)
        for files in (log.paths[:1], log.paths)
    )
    assert few.num_batches("train") < all_files.num_batches("train")
    assert few.blocks_dir.parent == all_files.blocks_dir.parent == tmp_path / "schema.blocks"
    assert few.blocks_dir != all_files.blocks_dir
    assert "fewer than a batch" in caplog.text
    typo = TableDataset(str(tmp_path / "none-*"), str(schema), batch_size=128)
    with pytest.raises(DataError, match="none-"):
        typo.num_batches("train")
