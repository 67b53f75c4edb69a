"""DLRMv3's streaming set: its tables, and generated ids whose histories grow and drift."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.commands.task import build_dataset
from dlrm_sharded.datasets.base import reuse_histogram
from dlrm_sharded.datasets.sequence_tables import (
    NUM_ITEMS,
    item_accesses,
    profiled_streaming_tables,
    profiled_yambda_tables,
    streaming_tables,
    yambda_tables,
)
from dlrm_sharded.datasets.sequences import StreamingDataset
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.testing import check_dataset
from tests.unit.commands.conftest import composed_config

ITEMS_OF_CATEGORY = NUM_ITEMS // 128
ITEMS_OF_SLICE = ITEMS_OF_CATEGORY // 100


def task_of(tables):
    return ShardingTask(tables, Topology(8, GIB, optimizer_bytes_per_row=4), 512)


def test_tables_are_the_published_ones():
    items, categories, users = streaming_tables(89)
    assert [t.num_embeddings for t in (items, categories, users)] == [10**9, 128, 10**7]
    assert (items.pooling_factor, users.pooling_factor) == (6330 + 32, 1)
    yambda = yambda_tables()
    assert sum(table.num_embeddings for table in yambda) == 15_051_712 + 278_000_000
    for tables, precision, gib in (
        ((items, categories, users), "fp16", 967),
        (yambda, "fp32", 560),
    ):
        assert task_of(tables).table_bytes / GIB == pytest.approx(gib, rel=1e-3)
        for table in tables:
            assert (table.embedding_dim, table.pooled, table.precision) == (512, False, precision)
            assert table.num_features == (2 if table.pooling_factor > 1 else 1)
    assert yambda_tables(crosses=False) == yambda[:4]


def test_a_task_of_sequences_is_read_as_it_was_written():
    task = task_of(profiled_streaming_tables(45, batch_size=512))
    assert ShardingTask.from_json(task.to_json()).tables == task.tables


def test_the_expected_profile_is_that_of_generated_ids():
    data = StreamingDataset(batch_size=128, timestamp=20)
    sparse = data.batch("train", 0, rank=0, world_size=1).sparse_features.to_dict()
    for table in data.tables:
        ids = sparse[table.name].values()
        assert len(ids) / 128 == pytest.approx(table.pooling_factor, rel=0.03)
        mean_bin = np.arange(17) @ np.array([reuse_histogram(ids), table.reuse_histogram]).T
        assert mean_bin[0] == pytest.approx(mean_bin[1], abs=0.5)


def test_popularity_is_that_of_the_closed_form_and_drifts():
    """The first items are in most histories, and later ones appear as time goes on."""
    shares = {}
    for timestamp in (3, 9):
        data = StreamingDataset(batch_size=512, timestamp=timestamp)
        items, _ = data.table_ids("item_id", "train", 0)
        slices = items % ITEMS_OF_CATEGORY // ITEMS_OF_SLICE
        shares[timestamp] = np.bincount(slices) / len(items)
        expected = item_accesses(timestamp)._mass
        np.testing.assert_allclose(shares[timestamp], expected, atol=0.01)
        assert (np.diff(expected) < 0).all()
    assert shares[9][:4].sum() < 0.85


def test_a_later_history_continues_an_earlier_one():
    histories = []
    for timestamp in (4, 5):
        ids = StreamingDataset(batch_size=4, timestamp=timestamp).sample_ids("train", 0, 1)
        histories.append(ids["item_id"][0][:-32])
    earlier, later = histories
    assert (later[: len(earlier)] == earlier).all()
    users = [StreamingDataset(batch_size=4, timestamp=t).sample_ids("val", 0, 4) for t in (4, 5)]
    assert (users[0]["user_id"][0] == users[1]["user_id"][0]).all()


@pytest.mark.parametrize("timestamp", [0, 3, None])
def test_conforms(timestamp):
    counts = {"num_train_batches": 3, "num_val_batches": 1}
    if timestamp is None:  # the first batch has no history yet, and the profile is of the middle
        data = StreamingDataset(batch_size=12, **counts)
        lengths = [len(data.table_ids("item_id", "train", i)[0]) for i in range(3)]
        assert lengths[0] < lengths[1] / 10 < lengths[2] / 10
        assert data.tables == StreamingDataset(batch_size=12, timestamp=45).tables
    else:
        check_dataset(lambda: StreamingDataset(batch_size=12, timestamp=timestamp, **counts))


@pytest.mark.parametrize("name", ["dlrm_v3_streaming", "yambda_5b"])
def test_yaml_builds_profiled_sequences(name):
    data = build_dataset(composed_config("plan", f"data={name}", "task=null", "batch_size=512"))
    for table in data.tables:
        assert not table.pooled
        assert sum(table.reuse_histogram) == pytest.approx(1.0)


def test_samples_of_a_user_share_its_history():
    """16 samples of a user use its ids 16 times as often, four bins further, as 1 sample does."""
    alone = profiled_yambda_tables(batch_size=64, samples_per_user=1)
    shared = profiled_yambda_tables(batch_size=1024)
    assert shared[0].reuse_histogram == pytest.approx((0.0,) * 4 + alone[0].reuse_histogram[:13])
    crosses = {table.name: table for table in shared}
    assert crosses["user_x_artist"].reuse_histogram[0] > 0.99
    assert crosses["user_x_is_organic"].reuse_histogram[4] > 0.99
    uniform = profiled_yambda_tables(batch_size=1024, alpha=0.0)
    assert dataclasses.replace(uniform[0], reuse_histogram=None) == yambda_tables()[0]
    assert uniform[0].reuse_histogram[4] > shared[0].reuse_histogram[4]
