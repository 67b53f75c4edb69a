"""Exchanges between ranks: their groups, and the precision of what they carry."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrm_sharded.distributed import Rank
from dlrm_sharded.sharded_model import shard_model, sharded_embeddings
from dlrm_sharded.task import Topology
from tests.distributed.ranks import run_ranks
from tests.distributed.small_model import (
    TABLES,
    global_batches,
    make_model,
    make_plan,
    optimizers,
    share,
)


def logits(rank: Rank, precision: str) -> torch.Tensor:
    """Logits of all steps on this rank."""
    config = optimizers("sgd")
    model = make_model()
    config.fuse_into(model)
    topology = Topology(rank.world_size, 10**9, compute_device="cpu")
    sharded = shard_model(
        model,
        make_plan("rows_and_columns", rank.world_size),
        TABLES,
        topology,
        seed=7,
        exchange_precision=precision,
    )
    optimizer = config.build(sharded)
    steps = []
    for batch in global_batches(rank.world_size):
        optimizer.zero_grad()
        loss, (_, step_logits, _) = sharded(share(batch, rank.rank))
        loss.backward()
        optimizer.step()
        steps.append(step_logits)
    return torch.stack(steps)


def test_less_precise_exchange_trains_nearly_alike() -> None:
    exact, rounded = run_ranks(logits, 2, "fp32"), run_ranks(logits, 2, "fp16")
    assert not torch.equal(rounded[0], exact[0])
    # 11 bits of a vector, and of gradients from the second step on
    torch.testing.assert_close(rounded, exact, rtol=2e-3, atol=2e-3)


def groups(rank: Rank) -> dict[str, Any]:
    model = make_model()
    optimizers("sgd").fuse_into(model)
    topology = Topology(rank.world_size, 10**9, compute_device="cpu")
    plan = make_plan("table_wise", rank.world_size)
    sharded = shard_model(model, plan, TABLES, topology, seed=7)
    wrapped = sharded._dmp_wrapped_module
    is_reduced = isinstance(wrapped, DistributedDataParallel)
    return {
        "dense_in_world": is_reduced and wrapped.process_group is dist.group.WORLD,
        "tables_in_world": sharded_embeddings(sharded)._env.process_group is dist.group.WORLD,
        "is_reduced": is_reduced,
    }


def test_tables_do_not_wait_for_dense_gradients() -> None:
    assert run_ranks(groups, 2) == {
        "dense_in_world": True,
        "tables_in_world": False,
        "is_reduced": True,
    }


def test_one_rank_reduces_nothing() -> None:
    assert not run_ranks(groups, 1)["is_reduced"]
