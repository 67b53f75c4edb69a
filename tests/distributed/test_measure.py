"""Measuring gives the stages of every rank and leaves the model as it was."""

from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.calibration.measure import MeasureConfig, measure
from dlrm_sharded.distributed import Rank
from dlrm_sharded.layouts import row_blocks
from dlrm_sharded.model import dlrm
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.plan_cost import STAGES
from dlrm_sharded.sharded_model import shard_model, sharded_embeddings
from dlrm_sharded.tables import Table
from dlrm_sharded.task import Topology
from dlrm_sharded.training.optimizers import OptimizerConfig
from tests.distributed.ranks import gathered, run_ranks
from tests.distributed.small_model import TABLES, global_batches, share

ITERATIONS = 4


def measure_plan(rank: Rank) -> dict[str, Any]:
    """Row- and column-wise shards; rank 1 has no column shard at all."""
    a, b, c = TABLES
    topology = Topology(rank.world_size, 10**9, compute_device="cpu")
    blocks = enumerate(row_blocks(c.num_embeddings, rank.world_size))
    rows = [Shard(c.name, r, block, (0, c.embedding_dim)) for r, block in blocks]
    plan = ShardingPlan(rank.world_size, (Shard.whole(a, 0), Shard.whole(b, 0), *rows))
    config = OptimizerConfig(
        embedding="rowwise_adagrad",
        embedding_learning_rate=0.1,
        dense="sgd",
        dense_learning_rate=0.1,
    )
    model = dlrm(TABLES, 3, dense_layers=[8, 8], over_layers=[8, 1], device=rank.device)
    config.fuse_into(model)
    sharded = shard_model(model, plan, TABLES, topology, seed=0)
    # A step first, so that there is optimizer state to change.
    optimizer = config.build(sharded)
    batches = [share(batch, rank.rank) for batch in global_batches(rank.world_size)]
    sharded(batches[0])[0].backward()
    optimizer.step()

    before = state_of(sharded)
    measured = measure(
        sharded_embeddings(sharded),
        [batch.sparse_features for batch in batches],
        MeasureConfig(iterations=ITERATIONS),
    )
    after = state_of(sharded)
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    return {
        "changed": gathered(rank, changed),
        "num_states": len(before),
        "per_rank": [cost.to_json() for cost in measured.cost.per_rank],
        "input_dist_ms": list(measured.cost.input_dist_ms),
        "spread": measured.spread,
        "iterations": measured.iterations,
        "agree": len(set(gathered(rank, measured.cost))) == 1,
    }


def state_of(sharded: torch.nn.Module) -> dict[str, Tensor]:
    """Weights, row states and step counts of this rank."""
    states = {}
    for i, lookup in enumerate(sharded_embeddings(sharded)._lookups):
        for j, kernel in enumerate(lookup._emb_modules):
            fused = kernel._emb_module
            states[f"{i}/{j}/iter"] = fused.iter.clone()
            for name, buffer in [*fused.named_buffers(), *fused.named_parameters()]:
                states[f"{i}/{j}/{name}"] = buffer.detach().clone()
    return states


def test_measures_and_leaves_the_model_alone() -> None:
    result = run_ranks(measure_plan, 2)
    assert result["changed"] == [[], []]
    assert result["num_states"] > 4
    assert result["agree"]
    assert result["iterations"] == ITERATIONS
    assert len(result["per_rank"]) == len(result["input_dist_ms"]) == 2
    for cost in result["per_rank"]:
        assert set(cost) == {f"{stage}_ms" for stage in STAGES}
        assert all(ms > 0 for ms in cost.values())
    assert set(result["spread"]) == {"input_dist", *STAGES}


def measure_big(rank: Rank) -> list[float]:
    """Rank 0 has all the work."""
    tables = (Table("big", 50_000, 128, 20.0), Table("tiny", 10, 4, 1.0))
    topology = Topology(rank.world_size, 10**9, compute_device="cpu")
    plan = ShardingPlan(2, (Shard.whole(tables[0], 0), Shard.whole(tables[1], 1)))
    model = dlrm(tables, 3, dense_layers=[8, 8], over_layers=[8, 1], device=rank.device)
    OptimizerConfig(
        embedding="sgd", embedding_learning_rate=0.1, dense="sgd", dense_learning_rate=0.1
    ).fuse_into(model)
    sharded = shard_model(model, plan, tables, topology, seed=0)
    size = 512
    ids = KeyedJaggedTensor(
        keys=["big", "tiny"],
        values=torch.cat([torch.randint(0, 50_000, (20 * size,)), torch.randint(0, 10, (size,))]),
        lengths=torch.tensor([20] * size + [1] * size, dtype=torch.int32),
    )
    measured = measure(sharded_embeddings(sharded), [ids], MeasureConfig(iterations=5))
    return [cost.fwd_compute_ms + cost.bwd_compute_ms for cost in measured.cost.per_rank]


def test_sees_who_works() -> None:
    """10,000 times the work on one rank shows, whatever else the machine does."""
    busy_ms, idle_ms = run_ranks(measure_big, 2)
    assert busy_ms > 3 * idle_ms
