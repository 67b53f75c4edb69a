"""Measures a finished run again, in one of the rounds in which a sweep compares its runs.

A run that is measured at another minute than the others is measured under other load. So all runs
of a sweep are built again by their plans in every round, in an order of its own, and each takes a
short stretch of steps. The weights are new ones, as no time depends on them, and nothing that the
run has left is changed: a line of `FILE_NAME` in its folder is all that a round adds.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.datasets.base import SPLITS
from dlrm_sharded.job.build import build_sharded
from dlrm_sharded.job.measure import measure_embeddings
from dlrm_sharded.job.run_folder import owned_folder
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.plans.plan import read_plan, with_precisions
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.runs.rounds import Round, rounds_file
from dlrm_sharded.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a run that one round measures.

    Args:
        round: number of the round, from 0.
        place: how many runs were measured before this one in the round.
        attempt: see `Round`.
        num_steps: steps of the stretch, without those of the warm-up.
    """

    round: int
    place: int
    attempt: int
    num_steps: int


def measure_round(settings: JobSettings, rank: Rank, run_dir: Path, stretch: Stretch) -> None:
    """Measure the run in a folder again, under its plan; a collective of all ranks.

    Raises:
        ConfigError: the folder has no plan, or another job owns it.
    """
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = settings.trainer.tf32
    with owned_folder(run_dir, rank) as folder:
        with all_or_none():
            plan = read_plan(run_dir / "plan.json")
            task = with_precisions(read_task(run_dir / "task.json"), plan)
            streams = [settings.stream(split, rank) for split in SPLITS]
        built = build_sharded(settings, rank, plan, task)
        embeddings = measure_embeddings(settings, rank, task, built)
        warmup = settings.trainer.num_warmup_steps
        trained = Trainer(
            built.model,
            optimizer=built.optimizer,
            lr_scheduler=LambdaLR(built.optimizer, settings.optimizer.schedule.factor),
            train_stream=streams[0],
            eval_stream=streams[1],
            config=dataclasses.replace(
                settings.trainer,
                num_steps=warmup + stretch.num_steps,
                eval_every_steps=None,
                num_eval_batches=0,
                trace=False,
                checkpoint=None,
            ),
            batch_size=settings.batch_size,
            rank=rank,
            log_scalar=lambda tag, value, step: None,
        ).run()
        with all_or_none():
            if rank.is_zero:
                folder.check_owner()
                found = Round(
                    round=stretch.round,
                    place=stretch.place,
                    embedding_cost_ms=embeddings.cost.cost_ms,
                    spread=max(embeddings.spread.values(), default=0.0),
                    step_ms=trained.step_ms,
                    step_spread=trained.samples_per_s / trained.samples_per_s_p10 - 1,
                    samples_per_s=trained.samples_per_s,
                    **dataclasses.asdict(trained.surroundings),
                    seconds=time.perf_counter() - began,
                    attempt=stretch.attempt,
                )
                rounds_file(run_dir).append(dataclasses.asdict(found))
                log.info(
                    "round %d: embedding cost %.2f ms, %.0f samples/s",
                    stretch.round,
                    found.embedding_cost_ms,
                    found.samples_per_s,
                )
