"""Learning rates and clipping reach the parts of a sharded model that they are for."""

from dataclasses import replace

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.model.optimizers import Schedule
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.small_model import (
    B,
    local_shards,
    make_model,
    make_plan,
    optimizers,
    shard,
    shares,
)
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow


def train(rank: Rank) -> dict[str, list[dict[str, float]]]:
    return {name: _train(rank, *options) for name, options in OPTIONS.items()}


def _train(rank: Rank, clip_norm: float | None, schedule: Schedule) -> list[dict[str, float]]:
    """How far tables, replicas and dense layers moved in each of three steps."""
    config = replace(
        optimizers("sgd"),
        embedding_learning_rate=0.5,
        dense_learning_rate=0.5,
        clip_norm=clip_norm,
        schedule=schedule,
    )
    model = make_model()
    plan = make_plan("replicas_and_others", rank.world_size)
    sharded, optimizer = shard(rank, model, plan, config)
    lr_scheduler = LambdaLR(optimizer, schedule.factor)
    moves = []
    for batch in shares(rank):
        tables, replicas = weights(sharded)
        dense = [p.detach().clone() for p in model.dense_arch.parameters()]
        optimizer.zero_grad()
        sharded(batch)[0].backward()
        optimizer.step()
        lr_scheduler.step()
        moves.append(
            {
                "tables": distance(tables, weights(sharded)[0]),
                "replicas": distance(replicas, weights(sharded)[1]),
                "dense": distance(dense, list(model.dense_arch.parameters())),
            }
        )
    return moves


def weights(sharded: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights of this rank that are sharded, and those that are replicated."""
    shards = local_shards(sharded)
    return (
        [weight for name, _, weight in shards if name != B],
        [weight for name, _, weight in shards if name == B],
    )


def distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return float(sum((a.detach() - b.detach()).square().sum() for a, b in pairs)) ** 0.5


PARTS = ("tables", "replicas", "dense")
HALF_AT_FIRST = Schedule(warmup_steps=2, decay_start_step=2, decay_steps=1)
OPTIONS = {
    "half": (None, HALF_AT_FIRST),
    "constant": (None, Schedule()),
    "stopping": (None, Schedule(decay_start_step=0, decay_steps=1)),
    "clipped": (1e-4, Schedule()),
}


def test_schedules_move_all_parts_and_clipping_holds_the_dense_part():
    """Half the rate, the whole rate, none at all."""
    assert [HALF_AT_FIRST.factor(step) for step in (0, 1, 3)] == [0.5, 1.0, 0.0]
    moves = run_ranks(train, 2)
    for part in PARTS:
        constant, stopping = ([move[part] for move in moves[n]] for n in ("constant", "stopping"))
        assert constant[0] > 0
        assert abs(moves["half"][0][part] / constant[0] - 0.5) < 1e-3, part
        assert stopping[0] > 0
        assert stopping[1] == stopping[2] == 0
    for move in moves["clipped"]:
        assert move["dense"] <= 0.5 * 1e-4 * 1.01
        assert move["tables"] > 5e-4
        assert move["replicas"] > 1e-3
