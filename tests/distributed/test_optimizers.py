"""Learning rates and clipping reach both parts of a sharded model."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.distributed import Rank
from dlrm_sharded.sharded_model import shard_model
from dlrm_sharded.task import Topology
from dlrm_sharded.training.optimizers import OptimizerConfig, Schedule
from tests.distributed.ranks import run_ranks
from tests.distributed.small_model import (
    TABLES,
    global_batches,
    local_shards,
    make_model,
    make_plan,
    share,
)


def train(rank: Rank, clip_norm: float | None, schedule: Schedule) -> list[dict[str, Any]]:
    """How far the two parts of the model moved in each of three steps."""
    config = OptimizerConfig(
        embedding="sgd",
        embedding_learning_rate=0.5,
        dense="sgd",
        dense_learning_rate=0.5,
        clip_norm=clip_norm,
        schedule=schedule,
    )
    model = make_model()
    config.fuse_into(model)
    topology = Topology(rank.world_size, 10**9, compute_device="cpu")
    plan = make_plan("columns_uneven", rank.world_size)
    sharded = shard_model(model, plan, TABLES, topology, seed=7)
    optimizer = config.build(sharded)
    lr_scheduler = LambdaLR(optimizer, schedule.factor)
    moves = []
    for batch in global_batches(rank.world_size):
        tables = [weight for _, _, weight in local_shards(sharded)]
        dense = [p.detach().clone() for p in model.dense_arch.parameters()]
        optimizer.zero_grad()
        sharded(share(batch, rank.rank))[0].backward()
        optimizer.step()
        lr_scheduler.step()
        moves.append(
            {
                "tables": distance(tables, [weight for _, _, weight in local_shards(sharded)]),
                "dense": distance(dense, list(model.dense_arch.parameters())),
            }
        )
    return moves


def distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return float(sum((a.detach() - b.detach()).square().sum() for a, b in pairs)) ** 0.5


def test_schedule_moves_both_parts() -> None:
    """Half the rate, the whole rate, none at all."""
    schedule = Schedule(warmup_steps=2, decay_start_step=2, decay_steps=1)
    assert [schedule.factor(step) for step in (0, 1, 3)] == [0.5, 1.0, 0.0]
    scheduled = run_ranks(train, 2, None, schedule)
    constant = run_ranks(train, 2, None, Schedule())
    for part in ("tables", "dense"):
        assert constant[0][part] > 0
        ratio = scheduled[0][part] / constant[0][part]
        assert abs(ratio - 0.5) < 1e-3, part

    stopping = run_ranks(train, 2, None, Schedule(decay_start_step=0, decay_steps=1))
    for part in ("tables", "dense"):
        assert stopping[0][part] > 0
        assert stopping[1][part] == stopping[2][part] == 0


def test_clipping_holds_the_dense_part() -> None:
    clipped = run_ranks(train, 2, 1e-4, Schedule())
    for move in clipped:
        assert move["dense"] <= 0.5 * 1e-4 * 1.01
        assert move["tables"] > 1e-3
