"""Chooses what `trainer.pipeline=auto` stands for, by the steps of earlier runs here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.fitting.step_journal import correction_of
from dlrm_sharded.job.predicted_step import host_time_of, overlap_of, step_journal
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.step.pipelines import AUTO, PIPELINES, default_pipeline
from dlrm_sharded.step.prediction import DensePart, StepCorrection, predict_step
from dlrm_sharded.training.pipeline import check_pipeline
from dlrm_sharded.training.trainer import TrainerConfig

log = logging.getLogger(__name__)

MIN_RUNS = 3
"""Runs whose steps must be noted for a pipeline to be chosen, or to be left for another one."""


def chosen_trainer(
    prepared: Prepared, plan: ShardingPlan, measured: MeasuredCost, dense: DensePart
) -> TrainerConfig:
    """Return the config of the training with a pipeline in the place of `auto`; a collective.

    Args:
        measured: measured cost of the plan, and the host's time for it on GPUs.
    """
    trainer = prepared.settings.trainer
    if trainer.pipeline != AUTO:
        return trainer
    name = on_rank_zero(lambda: _choose(prepared, plan, measured, dense))
    return dataclasses.replace(trainer, pipeline=name)


def fastest(steps_ms: Mapping[str, tuple[float, float]], default: str) -> str:
    """Return the pipeline whose step is shorter than the default's by more than its error.

    Args:
        steps_ms: predicted step and its relative error, by pipelines that were measured.
    """
    if default not in steps_ms:
        return default
    best = min(steps_ms, key=lambda name: steps_ms[name][0])
    step_ms, error = steps_ms[best]
    return best if step_ms * (1 + error) < steps_ms[default][0] else default


def _choose(
    prepared: Prepared, plan: ShardingPlan, measured: MeasuredCost, dense: DensePart
) -> str:
    settings, rank = prepared.settings, prepared.rank
    default = default_pipeline(rank.device.type)
    corrections: dict[str, StepCorrection] = {}
    trainers = {
        name: dataclasses.replace(settings.trainer, pipeline=name)
        for name in _candidates(default, plan)
    }
    for name, trainer in trainers.items():
        journal = step_journal(prepared.journal, prepared.context, trainer, rank)
        correction = correction_of(journal.read() if journal else [])
        if correction.num_runs >= MIN_RUNS:
            corrections[name] = correction
    if default not in corrections or len(corrections) == 1:
        return default
    steps_ms = {}
    for name, correction in corrections.items():
        overlap = overlap_of(trainers[name], rank)
        step_ms = predict_step(
            measured.cost,
            dense,
            overlap=overlap,
            batch_size=settings.batch_size,
            seed=settings.seed,
            host=host_time_of(measured, dense, rank),
        ).step_ms
        steps_ms[name] = (correction.factor * step_ms, correction.error)
    name = fastest(steps_ms, default)
    if name != default:
        log.info(
            "trainer.pipeline=auto is %s: by earlier runs here, a step takes %.2f ms with it and "
            "%.2f ms with %s",
            name,
            steps_ms[name][0],
            steps_ms[default][0],
            default,
        )
    return name


def _candidates(default: str, plan: ShardingPlan) -> Iterator[str]:
    """Yield the pipelines that train alike and need no more memory than was estimated."""
    for name, pipeline in PIPELINES.items():
        if not pipeline.is_exact:
            continue
        if pipeline.num_batches > PIPELINES[default].num_batches:
            continue
        try:
            check_pipeline(name, plan, "cuda")
        except ConfigError:
            continue
        yield name
