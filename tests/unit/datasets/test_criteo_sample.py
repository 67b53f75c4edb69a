"""`data=criteo_sample`: a generated log that is served as Criteo's files are."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from dlrm_sharded.commands.asked_task import build_dataset
from dlrm_sharded.datasets.criteo_sample import CriteoSampleDataset, sample_rows
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.user_cache import CACHE_VARIABLE
from dlrm_sharded.testing import check_dataset
from tests.unit.commands.conftest import composed_config

NUM_ROWS = 700


def sample(*overrides: str) -> CriteoSampleDataset:
    small = ("data=criteo_sample", f"data.num_rows={NUM_ROWS}", "batch_size=48")
    dataset = build_dataset(composed_config("train", *small, *overrides))
    assert isinstance(dataset, CriteoSampleDataset)
    return dataset


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "criteo_sample" / f"{NUM_ROWS}_rows_seed_0"


def test_the_cache_keeps_it_from_its_first_use_on(cache: Path) -> None:
    data = sample()
    assert not cache.exists(), "rank 0 asks first"
    assert (data.num_batches("train"), data.num_batches("val")) == (600 // 48, 100 // 48)
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    rows = sample_rows(0, NUM_ROWS, seed=0)[0][48:96]
    batch = sample().batch("train", 1, rank=0, world_size=1)
    assert batch.labels.tolist() == rows["label"].to_list()
    integers = rows.select(pl.col("^int_.*$").fill_null(0).clip(0)).to_numpy()
    torch.testing.assert_close(batch.dense_features, torch.from_numpy(np.log1p(integers)).float())
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == written
    (cache / "train.txt").unlink()
    assert sample().num_batches("train") == 600 // 48, "the converted form is enough"


def test_is_a_dataset(tmp_path: Path, cache: Path) -> None:
    check_dataset(lambda: sample(f"data.path={tmp_path / 'mine'}"))
    assert not cache.exists()


def test_seeds_and_sizes_have_folders_of_their_own(cache: Path) -> None:
    labels = [
        sample(*overrides).batch("train", 0, rank=0, world_size=1).labels.tolist()
        for overrides in ((), ("seed=1",), ("data.num_rows=800",))
    ]
    assert labels[0] != labels[1]
    assert len(list(cache.parent.iterdir())) == 3


@pytest.mark.parametrize("key", ["data.num_rows", "data.seed", "data.path"])
def test_says_what_cannot_be_used(key: str) -> None:
    value = "''" if key == "data.path" else "-1"
    with pytest.raises(Exception, match=key) as error:
        sample(f"{key}={value}")
    assert isinstance(error.value.__cause__, ConfigError)
