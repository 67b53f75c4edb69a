"""Predicts the step of a run: measures its dense part and its data, and adds the plan's cost."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_sharded.datasets.read_batches import read_batches
from dlrm_sharded.dense.times import measure_all_reduce, measure_dense
from dlrm_sharded.explain.step_text import step_text
from dlrm_sharded.fitting.picture import conditions_of
from dlrm_sharded.fitting.run_journal import RunJournal
from dlrm_sharded.fitting.step_journal import MeasuredStep, StepConditions, StepJournal
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job.plan import Planned
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.step.host_time import HostTime
from dlrm_sharded.step.pipelines import PIPELINES, pipeline_name
from dlrm_sharded.step.prediction import (
    DensePart,
    StepCorrection,
    StepPrediction,
    predict_step,
)
from dlrm_sharded.step.schedule import Overlap
from dlrm_sharded.training.trainer import TrainerConfig

log = logging.getLogger(__name__)

DENSE_SHARE = 0.2
"""Time budget of the dense part relative to that of the embeddings (`measure.time_budget_s`)."""


def measure_dense_part(prepared: Prepared, planned: Planned) -> DensePart:
    """Measure what a step does beside the embeddings; a collective of all ranks.

    The training stream is left at another place.
    """
    settings, rank, task = prepared.settings, prepared.rank, planned.task
    stream, first_step = prepared.streams["train"], prepared.start.step
    budget_s = DENSE_SHARE * settings.measure.time_budget_s
    steps_left = settings.trainer.total_steps(len(stream)) - first_step
    batches, data_ms = read_batches(
        stream,
        first_step=first_step,
        num_steps=max(1, steps_left),
        budget_s=budget_s,
        num_kept=settings.measure.num_batches,
    )
    times = measure_dense(
        settings.build_model(task, rank.device),
        task.tables,
        [batch.to(rank.device) for batch in batches],
        settings.optimizer,
        iterations=settings.measure.iterations,
        time_budget_s=budget_s,
        data_ms=data_ms,
    )
    all_reduce_ms = measure_all_reduce(times.gradient_bytes, rank.device)
    by_rank = [times] * rank.world_size
    dist.all_gather_object(by_rank, times)
    return DensePart(tuple(by_rank), all_reduce_ms)


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """The predicted step of a run, the same on all ranks.

    Args:
        predicted: from the plan's predicted cost; None if it has none.
        composed_ms: step from the measured cost, without a correction.
    """

    predicted: StepPrediction | None
    composed_ms: float


def predict_run(
    prepared: Prepared,
    planned: Planned,
    measured: MeasuredCost,
    dense: DensePart,
    *,
    trainer: TrainerConfig,
    correction: StepCorrection,
) -> RunPrediction:
    """Predict the step.

    Args:
        measured: measured cost of the plan, and the host's time for it on GPUs.
        trainer: with the chosen pipeline.
        correction: from earlier runs; rank 0's counts.
    """
    settings, rank, report = prepared.settings, prepared.rank, planned.report
    predict = functools.partial(
        predict_step,
        dense=dense,
        overlap=overlap_of(trainer, rank),
        batch_size=settings.batch_size,
        seed=settings.seed,
        host=host_time_of(measured, dense, rank),
    )
    composed_ms = predict(measured.cost).step_ms
    if report.cost is None:
        return RunPrediction(None, composed_ms)
    predicted = predict(
        report.cost,
        cost_error=report.standing.error if report.standing else None,
        correction=correction,
    )
    if rank.is_zero:
        log.info("%s", step_text(predicted))
        if correction.num_runs:
            log.info(
                "earlier runs here (%d) took %.2f times as long for a step as its parts",
                correction.num_runs,
                correction.factor,
            )
    return RunPrediction(predicted, composed_ms)


def step_journal(
    journal: RunJournal | None, context: RunContext, trainer: TrainerConfig, rank: Rank
) -> StepJournal | None:
    """Return the journal of the steps of runs like this one; None without a journal of runs."""
    conditions = conditions_of(context)
    if journal is None or conditions is None:
        return None
    overlap = dataclasses.asdict(overlap_of(trainer, rank))
    beside = [name for name, is_beside in overlap.items() if is_beside is True]
    pipeline = pipeline_name(trainer.pipeline, rank.device.type)
    if pipeline not in ("base", "sparse_dist"):  # which the others tell from each other
        beside.append(pipeline)
    return StepJournal.beside(journal, StepConditions(conditions, "+".join(beside) or "serial"))


def note_step(journal: StepJournal | None, prediction: RunPrediction, step_ms: float) -> None:
    """Append the measured step to the journal; a run without steady steps tells nothing."""
    if journal is not None and math.isfinite(step_ms):
        journal.append(MeasuredStep(prediction.composed_ms, step_ms))


def host_time_of(measured: MeasuredCost, dense: DensePart, rank: Rank) -> HostTime | None:
    """Return the time that the hosts of GPUs need for a step, as measured; None on CPUs."""
    if rank.device.type != "cuda":
        return None
    dense_ms = max(times.launch_ms for times in dense.by_rank)
    return HostTime(dense_ms, measured.host_ms, frozenset({"dense", "lookups"}))


def overlap_of(trainer: TrainerConfig, rank: Rank) -> Overlap:
    """Return what runs beside what in the steps of a run."""
    threads = torch.get_num_threads() * rank.local_world_size
    pipeline = PIPELINES[pipeline_name(trainer.pipeline, rank.device.type)]
    return Overlap(
        exchanges=rank.device.type == "cuda" or threads < (os.cpu_count() or 1),
        next_ids=pipeline.next_ids,
        reads_ahead=trainer.prefetch_depth(rank.device) > 0,
        next_lookup=pipeline.next_lookup,
    )
