"""Shards that are too large for this machine get fewer rows, and no more of them than needed."""

import numpy as np
import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.simulation.accesses import draw_profile, drawn_ids
from dlrm_sharded.simulation.folding import MIN_ROWS, fold

TABLES = (Table("large", 400_000, 8, 2.0), Table("wide", 100_000, 16, 2.0), Table("s", 2000, 4, 1))
TASK = ShardingTask(TABLES, Topology(1, memory_bytes=GIB, compute_device="cpu"), 1024)
SHARDS = [Shard.whole(table, 0) for table in TABLES]
IDS = drawn_ids(TASK, lambda table, batch: draw_profile(table, 1024, 0, batch), num_batches=2)
TOTAL_BYTES = sum(shard.weight_bytes for shard in SHARDS)


def test_what_fits_stays_as_it_is() -> None:
    folded, ids = fold(SHARDS, IDS, limit_bytes=TOTAL_BYTES)
    assert folded == SHARDS
    assert not ids.unfolded
    assert ids.shard_ids(SHARDS[0], 1) == IDS.shard_ids(SHARDS[0], 1)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_the_largest_shards_are_folded(share: float) -> None:
    folded, ids = fold(SHARDS, IDS, limit_bytes=int(share * TOTAL_BYTES))
    assert sum(shard.weight_bytes for shard in folded) <= share * TOTAL_BYTES
    assert sum(shard.weight_bytes for shard in folded) > 0.99 * share * TOTAL_BYTES
    assert folded[2] == SHARDS[2]
    assert len(ids.unfolded) == (1 if share == 0.9 else 2)
    for shard in folded[:1]:
        drawn = ids.shard_ids(shard, 0)
        assert drawn.values.max() < shard.num_rows < SHARDS[0].num_rows
        assert np.array_equal(drawn.values, IDS.shard_ids(SHARDS[0], 0).values % shard.num_rows)
        assert not ids.is_row_block(shard)


def test_a_row_block_keeps_its_kernel() -> None:
    block = Shard("large", 0, (200_000, 400_000), (0, 8))
    [folded], ids = fold([block], IDS, limit_bytes=block.weight_bytes // 2)
    assert folded.num_rows == 100_000
    assert ids.is_row_block(folded)
    assert ids.shard_ids(folded, 0).lengths.sum() == IDS.shard_ids(block, 0).lengths.sum()


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="table_gib"):
        fold(SHARDS, IDS, limit_bytes=MIN_ROWS * 4)
