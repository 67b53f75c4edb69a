"""Starts a part of a soak test as ranks of a job."""

from __future__ import annotations

import os
from pathlib import Path

from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.model_state import ModelState
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.ranks.distributed import Rank
from tests import preloaded
from tests.preloaded import ROOT


def start(script: str, num_ranks: int, *arguments: str) -> None:
    """Run a script on so many ranks, and wait for its end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    paths = (ROOT, ROOT / "launch")
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = [*torchrun, str(Path(script).resolve()), *arguments]
    with preloaded.start(*command, env=environment, stdout=None, stderr=None) as process:
        if process.wait() != 0:
            raise RuntimeError(f"{script} failed on {num_ranks} ranks")


def run_state(rank: Rank, plan: ShardingPlan, state: ModelState, *, step: int = 1) -> RunState:
    """Return what a manifest says of a model that no run trains."""
    return RunState(
        run="soak",
        step=step,
        batch_size=1,
        seed=0,
        epoch_batches=1,
        world_size=rank.world_size,
        optimizers={},
        column_bounds=state.column_bounds,
        progress={},
        plan=plan.to_json(),
        config={},
    )
