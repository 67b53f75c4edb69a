"""One training run, from its settings to its result."""

from __future__ import annotations

from pathlib import Path

import torch

from dlrm_sharded.job.build import build, build_dry, resume
from dlrm_sharded.job.choose_plan import choose_plan, write_start
from dlrm_sharded.job.measure_run import measure_cost
from dlrm_sharded.job.owned_folder import owned_folder, with_checkpoints
from dlrm_sharded.job.prepare import prepare
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.job.train_and_save import conclude, finished_objective, train
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank


def run(settings: JobSettings, rank: Rank, run_dir: Path) -> float:
    """Run on all ranks together; return the value of result.json under the key `objective`.

    Every step returns a frozen value on all ranks, or raises the same error on all of them.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.trainer.tf32
    with owned_folder(run_dir, rank) as owned:
        prepared = prepare(settings, rank, with_checkpoints(owned, settings, rank))
        if (objective := on_rank_zero(lambda: finished_objective(prepared))) is not None:
            return objective
        planned = choose_plan(prepared)
        writes_now = settings.dry_run or prepared.start.resumed is None
        if writes_now:  # so that a run leaves its plan even if building it fails
            on_rank_zero(lambda: write_start(prepared, planned))
        if settings.dry_run:
            return build_dry(prepared, planned)
        built = build(settings, rank, planned.plan, planned.task)
        measured = measure_cost(prepared, planned, built)
        progress = resume(prepared, planned, built)
        if not writes_now:  # an interrupted run stays unchanged until its checkpoint is read
            on_rank_zero(lambda: write_start(prepared, planned))
        trained = train(prepared, planned, built, measured, progress)
        return on_rank_zero(lambda: conclude(prepared, planned, measured, trained))
