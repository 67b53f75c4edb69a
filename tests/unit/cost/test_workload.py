"""Vectors that ranks look up and exchange: one for each feature of a sample, or for each id."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.cost.learned import shipped_prior
from dlrm_sharded.cost.shapes import PiecePricer
from dlrm_sharded.cost.workload import FLOAT_BYTES, ID_BYTES, Workload, workload_of_plan
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.layouts import ColumnShards, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

ONCE = (1.0, *[0.0] * (NUM_REUSE_BINS - 1))
COMPUTE = shipped_prior(RunContext("cpu")).compute
BATCH_SIZE, NUM_RANKS = 1000, 4
POOLED = Table("pooled", 4_000, 32, 50.0, ONCE)
SHARED = dataclasses.replace(POOLED, name="shared", num_features=3)
SEQUENCE = dataclasses.replace(POOLED, name="sequence", pooled=False)


def workload(*shards: Shard, tables: tuple[Table, ...]) -> Workload:
    task = ShardingTask(tables, Topology(NUM_RANKS, memory_bytes=2**30), BATCH_SIZE)
    return workload_of_plan(ShardingPlan(NUM_RANKS, shards), task)


@pytest.mark.parametrize(("table", "per_sample"), [(POOLED, 1), (SHARED, 3), (SEQUENCE, 50)])
def test_a_rank_sends_the_vectors_of_each_feature_or_of_each_id(table, per_sample):
    found = workload(*ColumnShards.shards(table, [(1, 24), (2, 8)]), tables=(table,))
    vectors = found.exchange(for_ids=False)
    column_bytes = FLOAT_BYTES * BATCH_SIZE * per_sample / NUM_RANKS
    assert vectors.volume.tolist() == pytest.approx([0, 24 * column_bytes, 8 * column_bytes, 0])
    lengths = max(table.num_features, 1)
    ids = found.exchange(for_ids=True).volume
    of_table = ID_BYTES * BATCH_SIZE * (50 + lengths) / NUM_RANKS
    assert ids.tolist() == pytest.approx([0, of_table, of_table, 0])


def test_row_blocks_of_sequences_are_exchanged_and_not_reduced():
    """A row block has the whole vectors of its ids, so it sends each of them once."""
    rows = workload(*RowBlocks(range(NUM_RANKS)).shards(SEQUENCE), tables=(SEQUENCE,))
    exchange = rows.exchange(for_ids=False)
    assert exchange.reduces == ()
    sent = FLOAT_BYTES * 32 * BATCH_SIZE * 50 / NUM_RANKS
    assert exchange.volume.sum() == pytest.approx(sent)
    assert rows.exchange(for_ids=True).reduces, "ids of row blocks are still sent to all of them"


@pytest.mark.parametrize("table", [POOLED, SHARED, SEQUENCE], ids=lambda table: table.name)
@pytest.mark.parametrize("in_rows", [False, True])
def test_pieces_are_priced_as_plans_are(table, in_rows):
    task = ShardingTask((table,), Topology(NUM_RANKS, memory_bytes=2**30), BATCH_SIZE)
    pricer = PiecePricer(task, COMPUTE)
    if in_rows:
        blocks = pricer.row_blocks(NUM_RANKS)
        plan = workload(*RowBlocks(range(NUM_RANKS)).shards(table), tables=(table,))
        piece, reduced = blocks.block, blocks.reduce_volume[0]
    else:
        piece = pricer.columns(np.array([0]), np.array([table.embedding_dim]))
        plan, reduced = workload(Shard.whole(table, 0), tables=(table,)), 0.0
    exchange = plan.exchange(for_ids=False)
    assert exchange.volume[0] == pytest.approx(piece.volume[0])
    assert sum(reduce.volume[0] for reduce in exchange.reduces) == pytest.approx(reduced)


def test_selected_shards_keep_how_they_pool():
    both = workload(Shard.whole(POOLED, 0), Shard.whole(SEQUENCE, 1), tables=(POOLED, SEQUENCE))
    assert both.select(np.array([False, True])).num_vectors.tolist() == [BATCH_SIZE * 50]


def test_longer_sequences_cost_more_where_bags_cost_the_same():
    """Writing a vector for each id takes time that pooling does not."""
    of_bags, of_ids = (
        COMPUTE.parts_ms(workload(Shard.whole(table, 0), tables=(table,))).sum()
        for table in (POOLED, SEQUENCE)
    )
    assert of_ids > of_bags


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_features": 0}, "num_features is 0"),
        ({"num_features": 1.5}, "num_features is 1.5"),
        ({"pooled": "no"}, "pooled is 'no', must be true or false"),
    ],
)
def test_tables_that_are_none(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(POOLED, **changes)


def test_a_task_file_has_what_differs_from_a_pooled_table_of_one_feature():
    assert {"num_features", "pooled"}.isdisjoint(POOLED.to_json())
    assert SHARED.to_json()["num_features"] == 3
