"""One training run, from its settings to its result."""

from __future__ import annotations

from pathlib import Path

import torch

from dlrm_sharded.job.build import build, build_dry
from dlrm_sharded.job.conclude import conclude, finished_objective
from dlrm_sharded.job.measure import measure
from dlrm_sharded.job.plan import plan
from dlrm_sharded.job.prepare import prepare
from dlrm_sharded.job.resume import resume
from dlrm_sharded.job.run_folder import owned_folder, with_checkpoints
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.job.train import train
from dlrm_sharded.ranks.distributed import Rank


def run(settings: JobSettings, rank: Rank, run_dir: Path) -> float:
    """Run on all ranks together; return the entry of result.json that the objective names.

    Every step returns a frozen value on all ranks, or raises the same error on all of them.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.trainer.tf32
    with owned_folder(run_dir, rank) as owned:
        folder = with_checkpoints(
            owned, settings.trainer.checkpoint, rank, writes=not settings.dry_run
        )
        prepared = prepare(settings, rank, folder)
        if (objective := finished_objective(prepared)) is not None:
            return objective
        planned = plan(prepared)
        if settings.dry_run:
            return build_dry(prepared, planned)
        built = build(prepared, planned)
        measured = measure(prepared, planned, built)
        progress = resume(prepared, planned, built)
        trained = train(prepared, planned, built, measured, progress)
        return conclude(prepared, planned, measured, trained)
