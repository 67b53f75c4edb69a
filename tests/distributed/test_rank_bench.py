"""Shards measured alone are looked up as they are on a rank of their plan."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dlrm_sharded.accesses.patterns import UniformAccesses
from dlrm_sharded.measuring import bench as bench_module
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import RankBench, draw_ids
from dlrm_sharded.model.fused_lookups import fused_lookups
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow

TABLES = (
    Table("bag", 50, 12, 3.0, features=("a feature",)),
    Table("whole", 40, 16, 2.0, pooled=False),
    Table("again", 70, 16, 0.5, pooled=False),
)
BATCH_SIZE = 24
CONFIG = MeasureConfig(iterations=3, warmup=1, num_batches=2, time_budget_s=0.1)


def measured_with(rank: Rank) -> dict[str, Any]:
    """Whole tables, columns of one, and a block of rows are measured, of bags and of sequences."""
    bag, whole, again = TABLES
    ids = draw_ids(TABLES, batch_size=BATCH_SIZE, num_batches=2, seed=0)
    shards = [
        *(Shard.whole(bag, 2), Shard("bag", 2, (0, 50), (4, 8))),
        Shard("bag", 2, row_blocks(50, 4)[2], (0, 12)),
        *(Shard.whole(whole, 2), Shard("whole", 2, (0, 40), (0, 8))),
        *(Shard("again", 2, row_blocks(70, 4)[1], (0, 16)), Shard.whole(again, 2)),
    ]
    seen: list[Any] = []
    measure = bench_module.measure_modules

    def spy(modules: Any, config: MeasureConfig, **group: Any) -> Any:
        for module in modules:
            embeddings, batch = module.embeddings, module.batches[1]
            context = embeddings.create_context()
            received = embeddings.input_dist(context, batch).wait().wait()
            looked_up = embeddings.compute(context, received)
            seen.append(
                {
                    "ids": {key: batch[key].values() for key in batch.keys()},  # noqa: SIM118
                    "pooled": isinstance(embeddings, ShardedEmbeddingBagCollection),
                    "vectors": sorted(list(vectors.shape) for vectors in looked_up),
                }
            )
        before = [t for module in modules for t in state_of(module.embeddings)]
        measured = measure(modules, config, **group)
        after = [t for module in modules for t in state_of(module.embeddings)]
        seen.append(list(map(torch.equal, before, after)))
        return measured

    bench_module.measure_modules = spy
    bench = RankBench(CONFIG, rank.device, table_bytes=10**6, optimizer="rowwise_adagrad")
    cost = bench.measure(shards, ids)
    bench.measure(shards[:2], ids)
    return {
        "cost": list(cost.to_json().values()),
        "seen": seen,
        "ids": [torch.from_numpy(ids.shard_ids(shard, 1).values) for shard in shards],
    }


def state_of(embeddings: Any) -> list[torch.Tensor]:
    """Return weights, optimizer state and step counts of a module's lookups, copied."""
    kernels = list(fused_lookups(embeddings))
    tensors = [t for kernel in kernels for t in kernel.emb_module.state_dict().values()]
    return [t.clone() for t in [*tensors, *(kernel.emb_module.iter for kernel in kernels)]]


def test_lookups_of_a_rank():
    """Each shard is as large as it is, with the ids that reach it.

    Sequences are modules of one width each, whose lookups give a vector for each id. A block of
    rows has a lookup of its own.
    """
    found = run_ranks(measured_with, 1)
    bags, whole, narrow, same, alone, _ = found["seen"]
    assert [module["pooled"] for module in (bags, whole, narrow)] == [True, False, False]
    keys = [list(module["ids"]) for module in (bags, whole, narrow)]
    assert keys == [["t0", "t1", "t2"], ["t3", "t5", "t6"], ["t4"]]
    for module in (bags, whole, narrow):
        for key, ids in module["ids"].items():
            assert torch.equal(ids, found["ids"][int(key[1:])])
    *_, of_whole, of_columns, of_rows, of_again = map(len, found["ids"])
    assert bags["vectors"] == [[BATCH_SIZE, 12], [BATCH_SIZE, 12 + 4]]
    assert whole["vectors"] == sorted([[of_whole + of_again, 16], [of_rows, 16]])
    assert narrow["vectors"] == [[of_columns, 8]]
    assert alone["vectors"] == [[BATCH_SIZE, 12 + 4]]
    forward, forward_comm, backward_comm, backward = found["cost"]
    assert min(forward, backward) > 0
    assert forward_comm == backward_comm == 0
    assert len(same) >= 12
    assert all(same)


@pytest.mark.parametrize("num_blocks", [1, 3, 4])
def test_blocks_share_the_ids(num_blocks):
    (ids,) = draw_ids(TABLES, batch_size=BATCH_SIZE, num_batches=1, seed=1).batches
    blocks = row_blocks(40, num_blocks)
    parts = [ids["whole"].in_rows(*block) for block in blocks]

    def by_sample(values: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        return [sorted(part.tolist()) for part in np.split(values, np.cumsum(lengths)[:-1])]

    of_parts = [
        by_sample(part.values + start, part.lengths)
        for part, (start, _) in zip(parts, blocks, strict=True)
    ]
    together = [sorted(itertools.chain(*sample)) for sample in zip(*of_parts, strict=True)]
    assert together == by_sample(ids["whole"].values, ids["whole"].lengths)
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
