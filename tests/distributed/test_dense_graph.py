"""Training the dense part at once is training it by autograd and DDP."""

import gc
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrm_sharded.files.errors import DivergenceError, PreemptedError
from dlrm_sharded.model.dense_graph import DenseGraph, _Recorded
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.training import meeting
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.trainer_config import TrainerConfig
from tests.cuda import install_graphs
from tests.distributed.small_model import make_sharded, run_trainer, shares, train_and_evaluate
from tests.preloaded.ranks import environments, finish_all, run_ranks
from tests.unit.checkpoint.cases import STATE, checkpoints_of_run

pytestmark = pytest.mark.slow

KINDS = ("rows_and_columns", "replicas_and_others")


def train(rank: Rank, cases: list[tuple[str, str, bool]]) -> list[list[float]]:
    """Losses of rank 0, whose own samples and those of all ranks decide them."""
    return [
        train_and_evaluate(rank, kind, shares(rank), pipeline=name, dense_graph=graph)
        for kind, name, graph in cases
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trains_as_without(num_ranks):
    for kind in KINDS:
        cases = [(kind, "base", False), *((kind, name, True) for name in PIPELINES)]
        expected, *others = run_ranks(train, num_ranks, cases)
        for name, found in zip(PIPELINES, others, strict=True):
            assert found == pytest.approx(expected, rel=1e-6), name


def weights_of_dense_part(rank: Rank) -> dict[str, Any]:
    """How the model is wrapped, and rank 1's dense weights, which were others at first."""
    from tests.distributed import small_model

    model = small_model.make_model(rank.device, dense_graph=True)
    with torch.no_grad():
        for weight in model.dense_arch.parameters():
            weight.add_(rank.rank)
    plan = small_model.make_plan("table_wise", rank.world_size)
    sharded, _ = small_model.shard(rank, model, plan, small_model.optimizers("sgd"))
    own = torch.cat([weight.detach().flatten() for weight in model.dense_arch.parameters()])
    return {
        "weights": small_model.gathered(rank, own),
        "has_ddp": any(isinstance(m, DistributedDataParallel) for m in sharded.modules()),
    }


def test_ranks_begin_with_the_weights_of_rank_0_and_without_ddp():
    found = run_ranks(weights_of_dense_part, 2)
    assert torch.equal(*found["weights"])
    assert not found["has_ddp"]


ENDS: dict[str, Callable[[], Any]] = {
    "done": nullcontext,
    "preempted": lambda: pytest.raises(PreemptedError),
    "diverged": lambda: pytest.raises(DivergenceError),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_graph_is_left_when_the_group_ends(end, tmp_path):
    """NCCL would wait for graphs that captured its collectives, and the job would never end."""
    finish_all(["-m", __name__, end, str(tmp_path)], environments(2, 2))


def end_on_cuda(end: str, folder: str) -> None:
    """Train to an end as one rank, whose model records graphs on the stand-in for CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        recorded, leave = install_graphs(patch), dist.destroy_process_group

        def leave_without_graphs(*args: Any) -> None:
            assert recorded[0].num_replays
            assert not [found for found in gc.get_objects() if isinstance(found, _Recorded)]
            leave(*args)

        patch.setattr(dist, "destroy_process_group", leave_without_graphs)
        patch.setattr(meeting, "INTERVAL_S", 0.0)  # the ranks meet after every batch
        with ENDS[end](), process_group() as rank:
            train_to(end, rank, Path(folder))


def train_to(end: str, rank: Rank, folder: Path) -> None:
    sharded, optimizer = make_sharded(rank, "table_wise", "sgd", dense_graph=True)
    [graph] = [module for module in sharded.modules() if isinstance(module, DenseGraph)]
    graph._device = torch.device("cuda")
    if end == "diverged":
        with torch.no_grad():
            graph._weights[0].fill_(math.nan)
    saved = checkpoints_of_run(folder, rank, STATE, in_background=False, every_steps=100)

    def stop(*_: Any) -> None:
        if end == "preempted":
            os.kill(os.getpid(), signal.SIGTERM)

    config = TrainerConfig(num_steps=9, log_every_steps=1)
    run_trainer(rank, sharded, optimizer, config, log_scalar=stop, checkpoints=saved)


if __name__ == "__main__":
    end_on_cuda(*sys.argv[1:])
