"""Shards measured alone are looked up as they are on a rank of their plan."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from dlrm_sharded.accesses.patterns import UniformAccesses
from dlrm_sharded.checkpoint.model_state import fused_kernels
from dlrm_sharded.measuring import bench as bench_module
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import RankBench, draw_ids
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow

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
    measure = bench_module.measure_modules

    def spy(modules: Any, config: MeasureConfig, **group: Any) -> Any:
        given.append([(module.embeddings, module.batches) for module in modules])
        return measure(modules, config, **group)

    bench_module.measure_modules = spy
    bench = RankBench(CONFIG, rank.device, table_bytes=10**6, optimizer="rowwise_adagrad")
    cost = bench.measure(shards, ids)
    bench.measure(shards[:2], ids)
    [(embeddings, batches)] = given[0]
    return {
        "cost": list(cost.to_json().values()),
        "num_lookups": [len(embeddings._lookups) for [(embeddings, _)] in given],
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


def measured_sequences(rank: Rank) -> dict[str, Any]:
    """A bag, two whole sequence tables, columns of one and rows of one, on one rank."""
    tables = (
        Table("bag", 50, 12, 3.0),
        Table("whole", 40, 16, 2.0, pooled=False),
        Table("again", 70, 16, 0.5, pooled=False),
    )
    ids = draw_ids(tables, batch_size=BATCH_SIZE, num_batches=2, seed=0)
    shards = [
        Shard.whole(tables[0], rank=0),
        Shard.whole(tables[1], rank=0),
        Shard("whole", 0, (0, 40), (0, 8)),
        Shard("again", 0, row_blocks(70, 4)[1], (0, 16)),
        Shard.whole(tables[2], rank=0),
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
                    "keys": batch.keys(),
                    "pooled": isinstance(embeddings, ShardedEmbeddingBagCollection),
                    "vectors": sorted(list(vectors.shape) for vectors in looked_up),
                }
            )
        before = [t for module in modules for t in state_of(module.embeddings)]
        measured = measure(modules, config, **group)
        after = [t for module in modules for t in state_of(module.embeddings)]
        seen.append({"same": list(map(torch.equal, before, after))})
        return measured

    bench_module.measure_modules = spy
    bench = RankBench(CONFIG, rank.device, table_bytes=10**6, optimizer="rowwise_adagrad")
    cost = bench.measure(shards, ids)
    return {
        "cost": cost.to_json(),
        "modules": seen,
        "num_ids": [len(ids.shard_ids(shard, 1).values) for shard in shards],
    }


def state_of(embeddings: Any) -> list[torch.Tensor]:
    """Return weights, optimizer state and step counts of a module's lookups, copied."""
    kernels = list(fused_kernels(embeddings))
    tensors = [t for kernel in kernels for t in kernel.emb_module.state_dict().values()]
    return [t.clone() for t in [*tensors, *(kernel.emb_module.iter for kernel in kernels)]]


def test_sequences_are_modules_of_their_own():
    """Their lookups give a vector for each id; a module of TorchRec's has one width."""
    seen = run_ranks(measured_sequences, 1)
    bag, whole, narrow, state = seen["modules"]
    assert [m["pooled"] for m in (bag, whole, narrow)] == [True, False, False]
    assert [m["keys"] for m in (bag, whole, narrow)] == [["t0"], ["t1", "t3", "t4"], ["t2"]]
    _, of_whole, of_columns, of_rows, of_again = seen["num_ids"]
    assert bag["vectors"] == [[BATCH_SIZE, 12]]
    assert whole["vectors"] == sorted([[of_whole + of_again, 16], [of_rows, 16]])
    assert narrow["vectors"] == [[of_columns, 8]]
    assert min(seen["cost"]["fwd_compute_ms"], seen["cost"]["bwd_compute_ms"]) > 0
    assert len(state["same"]) >= 12
    assert all(state["same"])


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
