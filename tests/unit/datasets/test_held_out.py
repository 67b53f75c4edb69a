"""Files that a trained model is evaluated on: their rows, what names them, and interruptions."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dlrm_sharded.datasets import conversion
from dlrm_sharded.datasets.encoder import ColumnEncoder
from dlrm_sharded.datasets.held_out import HeldOutDataset, has_label
from dlrm_sharded.datasets.schema import read_schema
from dlrm_sharded.datasets.source_files import find_files
from dlrm_sharded.files.errors import ConfigError, DataError

SCHEMA: dict[str, Any] = {
    "label": "y",
    "key": ["row"],
    "categorical": {"shop": {"ids": "as_is", "rows": 9, "dim": 4}},
}
MADE_OF = {"checkpoint": "step-5"}


def rows(first: int, num_rows: int, **changes: Any) -> pl.DataFrame:
    numbers = range(first, first + num_rows)
    frame = {"row": numbers, "y": [n % 2 for n in numbers], "shop": [n % 9 for n in numbers]}
    return pl.DataFrame(frame).with_columns(
        **{name: pl.lit(of, pl.Int64) for name, of in changes.items()}
    )


def dataset(folder: Path, *names: str, share: float = 1.0, **changes: Any) -> HeldOutDataset:
    encoder = ColumnEncoder(read_schema(SCHEMA | changes), {}, {})
    return HeldOutDataset(
        [str(folder / name) for name in names],
        encoder,
        {"shop": 4},
        folder / "scores.partial",
        batch_size=12,
        with_label=True,
        max_malformed_share=share,
    )


def test_files_without_usable_rows_are_between_others(tmp_path: Path) -> None:
    rows(0, 5).write_parquet(tmp_path / "a.parquet")
    rows(5, 0).write_parquet(tmp_path / "b.parquet")
    rows(5, 3, y=7).write_parquet(tmp_path / "c.parquet")
    pl.concat([rows(8, 2), rows(10, 2, y=7), rows(12, 2)]).write_parquet(tmp_path / "d.parquet")
    data = dataset(tmp_path, "a.parquet", "b.parquet", "c.parquet", "d.parquet")
    data.convert(MADE_OF)
    assert [part.num_rows for part in data.parts] == [5, 0, 0, 4]
    assert data.num_malformed == 5
    assert data.keys(0)["row"].to_list() == [0, 1, 2, 3, 4]
    assert data.keys(3)["row"].to_list() == [8, 9, 12, 13]  # the key is called as the row's number
    without_key = dataset(tmp_path, "d.parquet", key=[])
    without_key.convert(MADE_OF)
    assert without_key.keys(0).to_dict(as_series=False) == {
        "file": [str(tmp_path / "d.parquet")] * 4,
        "row": [0, 1, 4, 5],
    }


@pytest.mark.parametrize("num_rows", [1, 2, 12, 50])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_windows_have_each_row_once(
    tmp_path: Path, num_rows: int, world_size: int, first: int
) -> None:
    rows(0, num_rows).write_parquet(tmp_path / "a.parquet")
    data = dataset(tmp_path, "a.parquet")
    data.convert(MADE_OF)
    found: list[int] = []
    for windows in data.windows(first, world_size=world_size):
        assert len(windows) == world_size
        for window in windows:
            labels = data.read(window).labels
            assert len(labels) == min(12 // world_size, num_rows)
            numbers = range(window.first, window.stop)
            assert labels.tolist() == [number % 2 for number in numbers]
            found += numbers[window.skip :]
    assert found == [*range(first, num_rows)]


@pytest.mark.parametrize(
    ("bad", "share", "reason"),
    [
        (rows(0, 3, y=7), 0.1, "3 of 3 rows in total are malformed"),
        (rows(0, 3, y=7), 1.0, "have no usable row"),
        (rows(0, 0), 1.0, "have no usable row"),
        (rows(0, 3).drop("shop"), 1.0, "has no column 'shop'"),
    ],
)
def test_an_error_leaves_nothing(
    tmp_path: Path, bad: pl.DataFrame, share: float, reason: str
) -> None:
    bad.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=reason):
        dataset(tmp_path, "a.parquet", share=share).convert(MADE_OF)
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def of_other_time(folder: Path) -> None:
    rows(1, 5).write_parquet(folder / "a.parquet")
    os.utime(folder / "a.parquet", ns=(0, 0))


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        (lambda folder: None, True),
        (of_other_time, False),
        (lambda folder: shutil.copy(folder / "other/a.parquet", folder), False),
    ],
    ids=["same", "content", "file"],
)
def test_what_is_scored_is_kept_for_the_same_files_alone(
    tmp_path: Path, change: Callable[[Path], object], goes_on: bool
) -> None:
    (tmp_path / "other").mkdir()
    rows(3, 5).write_parquet(tmp_path / "other/a.parquet")
    rows(0, 5).write_parquet(tmp_path / "a.parquet")
    dataset(tmp_path, "a.parquet").convert(MADE_OF)
    kept = tmp_path / "scores.partial/scored.bin"
    kept.touch()
    change(tmp_path)
    dataset(tmp_path, "a.parquet").convert(MADE_OF)
    assert kept.exists() == goes_on
    kept.touch()
    dataset(tmp_path, "a.parquet").convert({"checkpoint": "step-6"})
    assert not kept.exists()


def test_files_of_one_name_and_size_in_other_folders_are_other_files(tmp_path: Path) -> None:
    for number, name in enumerate(("day=1", "day=2")):
        (tmp_path / name).mkdir()
        rows(number, 5).write_parquet(tmp_path / name / "a.parquet")
        os.utime(tmp_path / name / "a.parquet", ns=(0, 0))
        data = dataset(tmp_path, f"{name}/a.parquet")
        data.convert(MADE_OF)
        assert data.keys(0)["row"].to_list() == [*range(number, number + 5)]
        assert data.read(next(data.windows(0, world_size=1))[0]).labels[0] == number % 2


def test_a_folder_whose_removal_was_killed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(0, 5).write_parquet(tmp_path / "a.parquet")
    data = dataset(tmp_path, "a.parquet")
    data.convert(MADE_OF)

    def killed(folder: Path) -> None:
        (folder / "part-00000/labels.npy").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(conversion.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            conversion.discard(data.blocks_dir)
    data.convert(MADE_OF)
    assert data.num_rows == 5


def test_what_a_killed_scoring_left_is_no_data(tmp_path: Path) -> None:
    rows(0, 5).write_parquet(tmp_path / "a.parquet")
    (tmp_path / "scores.parquet.partial").mkdir()
    rows(0, 5).write_parquet(tmp_path / "scores.parquet.partial/scores-00000.parquet")
    assert find_files("data.files", str(tmp_path)) == [tmp_path / "a.parquet"]


def test_labels_and_keys_are_in_all_files(tmp_path: Path) -> None:
    schema, a, b = read_schema(SCHEMA), tmp_path / "a.parquet", tmp_path / "b.parquet"
    rows(0, 5).write_parquet(a)
    rows(0, 5).drop("y", "row").write_parquet(b)
    assert has_label(schema, [a], key=["row"])
    assert not has_label(schema, [b], key=())
    with pytest.raises(DataError, match=r"b\.parquet has no label 'y', and other files have it"):
        has_label(schema, [a, b], key=())
    with pytest.raises(DataError, match=r"b\.parquet has no column 'row', a key"):
        has_label(schema, [b], key=["row"])


def test_a_key_may_be_a_feature(tmp_path: Path) -> None:
    rows(0, 5).write_parquet(tmp_path / "a.parquet")
    data = dataset(tmp_path, "a.parquet", key=["shop", "y"])
    data.convert(MADE_OF)
    assert data.keys(0)["shop"].to_list() == [0, 1, 2, 3, 4]
    assert data.read(next(data.windows(0, world_size=1))[0]).labels.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("key", [["score"], ["row", "row"]])
def test_keys_that_scores_cannot_repeat(key: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"key is .* must have no 'score' and no name twice"):
        read_schema(SCHEMA | {"key": key})
