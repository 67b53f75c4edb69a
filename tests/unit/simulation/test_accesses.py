"""Ids are drawn table by table, and are the same for every rank that holds a piece of a table."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded.accesses.profiles import with_expected_profile
from dlrm_sharded.datasets.base import PerTableDataset, reuse_histogram
from dlrm_sharded.datasets.dlrm_datasets import DlrmDatasets
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.measuring.rank_bench import Ids
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.simulation.accesses import DrawnBatch, draw_profile, drawn_ids, ids_source

TABLES = (Table("a", 5000, 8, 2.5), Table("b", 300, 4, 4.0))
TASK = ShardingTask(TABLES, Topology(4, memory_bytes=GIB, compute_device="cpu"), 512)


def synthetic() -> SyntheticDataset:
    return SyntheticDataset(TABLES, batch_size=512, num_train_batches=3, num_val_batches=1)


def dlrm_datasets(folder: Path) -> DlrmDatasets:
    lengths = torch.randint(0, 4, (2, 1536), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.reshape(-1).cumsum(0)])
    indices = torch.arange(int(offsets[-1])) % 97
    torch.save((indices, offsets, lengths), folder / "file.pt")
    return DlrmDatasets(folder / "file.pt", batch_size=512, val_share=0.4)


@pytest.mark.parametrize("kind", ["synthetic", "dlrm_datasets"])
def test_ids_of_one_table_are_those_of_the_batch(kind: str, tmp_path: Path) -> None:
    dataset = synthetic() if kind == "synthetic" else dlrm_datasets(tmp_path)
    assert isinstance(dataset, PerTableDataset)
    for split, index in (("train", 0), ("train", 1), ("val", 0)):
        batch = dataset.batch(split, index, rank=0, world_size=1).sparse_features.to_dict()
        for table in dataset.tables:
            ids, lengths = dataset.table_ids(table.name, split, index)
            assert np.array_equal(ids, batch[table.name].values().numpy())
            assert np.array_equal(lengths, batch[table.name].lengths().numpy())


def test_a_dataset_gives_its_own_ids() -> None:
    draw, source = ids_source(TASK, synthetic(), seed=0)
    ids = drawn_ids(TASK, draw, num_batches=2)
    batch = synthetic().batch("train", 1, rank=0, world_size=1).sparse_features.to_dict()
    assert "dataset's training batches" in source
    assert np.array_equal(ids.batches[1]["b"].values, batch["b"].values().numpy())
    # replicas see the samples of their rank
    replica = Shard("b", 3, (0, 300), (0, 4), replicated=True)
    assert ids.shard_ids(replica, 0).lengths[:384].sum() == 0
    assert ids.shard_ids(replica, 0).lengths[384:].sum() > 0


def test_without_data_ids_follow_the_profiles() -> None:
    known = with_expected_profile(TABLES[:1], batch_size=512, exponent=0.4)
    draw, source = ids_source(dataclasses.replace(TASK, tables=(*known, TABLES[1])), None, seed=0)
    assert "1 of 2 tables have none" in source
    again, _ = ids_source(TASK, None, seed=1)
    one, other, of_seed = draw(known[0], 0), draw(known[0], 1), again(known[0], 0)
    assert np.array_equal(one.values, draw(known[0], 0).values)
    assert not np.array_equal(one.values[:100], other.values[:100])
    assert not np.array_equal(one.values[:100], of_seed.values[:100])


@pytest.mark.parametrize("exponent", [0.0, 0.9])
@pytest.mark.parametrize("rows", [50, 3000, 200_000])
def test_drawn_ids_have_the_reuse_of_the_profile(rows: int, exponent: float) -> None:
    table = Table("a", rows, 8, 3.5)
    [table] = with_expected_profile([table], batch_size=2048, exponent=exponent)
    ids = draw_profile(table, 2048, seed=0, batch=0)
    assert len(ids.values) == ids.lengths.sum()
    assert abs(len(ids.values) / 2048 - 3.5) < 0.05
    assert 0 <= ids.values.min() <= ids.values.max() < rows
    assert table.reuse_histogram is not None
    found = np.array(reuse_histogram(torch.from_numpy(ids.values)))
    assert np.abs(np.cumsum(found) - np.cumsum(table.reuse_histogram)).max() < 0.15


def test_odd_profiles_can_be_drawn() -> None:
    all_hot = (0.0,) * (NUM_REUSE_BINS - 1) + (1.0,)
    for histogram in (None, all_hot):
        table = Table("a", 3, 4, 2.0, reuse_histogram=histogram)
        ids = draw_profile(table, 64, seed=0, batch=0)
        assert len(ids.values) == 128
        assert ids.values.max() < 3


def test_tables_that_were_dropped_are_drawn_again_alike() -> None:
    tables = {table.name: table for table in TABLES}
    drawn: list[str] = []

    def draw(name: str) -> Ids:
        drawn.append(name)
        return draw_profile(tables[name], 64, seed=0, batch=0)

    batch = DrawnBatch(draw, kept_ids=1)
    first = batch["a"].values
    assert batch["a"].values is first
    assert len(batch["b"].values) == 256
    assert np.array_equal(batch["a"].values, first)
    assert drawn == ["a", "b", "a"]
