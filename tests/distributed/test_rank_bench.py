"""Shards measured alone are looked up as they are on a rank of their plan."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_sharded.accesses.patterns import UniformAccesses
from dlrm_sharded.calibration import bench as bench_module
from dlrm_sharded.calibration.measure import MeasureConfig
from dlrm_sharded.calibration.rank_bench import RankBench, draw_ids
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded.ranks import run_ranks

TABLES = (Table("a", 50, 16, 3.0), Table("b", 40, 8, 5.5), Table("c", 70, 32, 2.0))
BATCH_SIZE = 24
CONFIG = MeasureConfig(iterations=3, warmup=1, num_batches=2, time_budget_s=0.1)


def measured_with(rank: Rank) -> dict[str, Any]:
    """What `measure` is given for a whole table, columns of one, and a block of rows."""
    ids = draw_ids(TABLES, batch_size=BATCH_SIZE, num_batches=2, seed=0)
    shards = [
        Shard.whole(TABLES[0], rank=2),
        Shard("b", 2, (0, 40), (4, 8)),
        Shard("c", 2, row_blocks(70, 4)[2], (0, 32)),
    ]
    given: list[Any] = []
    measure = bench_module.measure

    def spy(embeddings: Any, batches: Any, config: MeasureConfig, **group: Any) -> Any:
        given.append((embeddings, batches))
        return measure(embeddings, batches, config, **group)

    bench_module.measure = spy
    bench = RankBench(CONFIG, rank.device, table_bytes=10**6, optimizer="rowwise_adagrad")
    cost = bench.measure(shards, ids)
    bench.measure(shards[:2], ids)
    embeddings, batches = given[0]
    return {
        "cost": list(cost.to_json().values()),
        "num_lookups": [len(embeddings._lookups) for embeddings, _ in given],
        "shapes": [list(weight.shape) for weight in embeddings.state_dict().values()],
        "ids": [batches[1][key].values() for key in ("t0", "t1", "t2")],
        "expected_ids": [torch.from_numpy(ids.shard_ids(shard, 1).values) for shard in shards],
    }


def test_lookups_of_a_rank():
    """A block of rows has its own; each shard is as large as it is, with the ids that reach it."""
    seen = run_ranks(measured_with, 1)
    assert seen["num_lookups"] == [2, 1]
    assert sorted(seen["shapes"]) == [[18, 32], [40, 4], [50, 16]]
    for found, expected in zip(seen["ids"], seen["expected_ids"], strict=True):
        assert torch.equal(found, expected)
    forward, forward_comm, backward_comm, backward = seen["cost"]
    assert min(forward, backward) > 0
    assert forward_comm == backward_comm == 0


@pytest.mark.parametrize("num_blocks", [1, 3, 4])
def test_blocks_share_the_ids(num_blocks):
    (ids,) = draw_ids(TABLES, batch_size=BATCH_SIZE, num_batches=1, seed=1).batches
    blocks = row_blocks(40, num_blocks)
    parts = [ids["b"].in_rows(*block) for block in blocks]

    def by_sample(values: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        return [sorted(part.tolist()) for part in np.split(values, np.cumsum(lengths)[:-1])]

    of_parts = [
        by_sample(part.values + start, part.lengths)
        for part, (start, _) in zip(parts, blocks, strict=True)
    ]
    together = [sorted(itertools.chain(*sample)) for sample in zip(*of_parts, strict=True)]
    assert together == by_sample(ids["b"].values, ids["b"].lengths)
    for part, (start, stop) in zip(parts, blocks, strict=True):
        assert part.values.min() >= 0
        assert part.values.max() < stop - start


def test_ids_are_drawn_with_the_given_skew():
    table = Table("a", 10_000, 4, 5.0)
    num_unique = [
        len(np.unique(ids.batches[0]["a"].values))
        for ids in (
            draw_ids([table], batch_size=1000, num_batches=1, seed=0, accesses=accesses)
            for accesses in (None, {"a": UniformAccesses()})
        )
    ]
    uniform = 10_000 * (1 - np.exp(-0.5))
    assert num_unique[0] < 0.8 * num_unique[1]
    assert num_unique[1] == pytest.approx(uniform, rel=0.05)
