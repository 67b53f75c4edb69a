"""Trains a run, and writes its events and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import logging

import yaml
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.job.build import Built
from dlrm_sharded.job.memory_check import used_text
from dlrm_sharded.job.plan import Planned
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.runs.run_events import HPARAMS, RunWriter
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.profiler import TRACE_FOLDER
from dlrm_sharded.training.progress import Progress
from dlrm_sharded.training.trainer import Trainer
from dlrm_sharded.training.training_result import TrainingResult

log = logging.getLogger(__name__)


def train(
    prepared: Prepared, planned: Planned, built: Built, measured: MeasuredCost, progress: Progress
) -> TrainingResult:
    """Train from `progress` to the end; a collective of all ranks."""
    rank, start, folder = prepared.rank, prepared.start, prepared.folder
    with RunWriter(
        folder.path,
        enabled=rank.is_zero,
        going_on=start.event_position,
        check_owner=folder.check_owner,
    ) as writer:
        _write_before_training(writer, prepared, planned, measured)
        trainer = _trainer(writer, prepared, planned, built, progress)
        result = trainer.run()
        writer.conclude(result)
    if rank.is_zero:
        estimated = planned.memory.estimated_peak_bytes(on_cuda=rank.device.type == "cuda")
        log.info("%s", used_text(estimated, result.peak_gib, result.reserved_gib))
    return result


def _write_before_training(
    writer: RunWriter, prepared: Prepared, planned: Planned, measured: MeasuredCost
) -> None:
    settings = prepared.settings
    values = (planned.report.made_by, str(settings.batch_size), str(settings.seed))
    text = yaml.safe_dump(dict(settings.config), sort_keys=False)
    writer.config(text, dict(zip(HPARAMS, values, strict=True)))
    writer.plan(
        planned.plan,
        planned.report,
        planned.task,
        measured.cost,
        step=prepared.start.step,
        is_new=planned.is_new,
    )


def _trainer(
    writer: RunWriter, prepared: Prepared, planned: Planned, built: Built, progress: Progress
) -> Trainer:
    settings, folder = prepared.settings, prepared.folder
    return Trainer(
        built.model,
        optimizer=built.optimizer,
        lr_scheduler=LambdaLR(built.optimizer, settings.optimizer.schedule.factor),
        train_stream=prepared.streams["train"],
        eval_stream=prepared.streams["val"],
        config=settings.trainer,
        batch_size=settings.batch_size,
        rank=prepared.rank,
        log_scalar=writer.scalar,
        checkpoints=_checkpoints(writer, prepared, planned, built),
        start=progress,
        trace_folder=folder.path / TRACE_FOLDER,
    )


def _checkpoints(
    writer: RunWriter, prepared: Prepared, planned: Planned, built: Built
) -> Checkpoints | None:
    """Return what writes the checkpoints of a run, or None if it is to write none."""
    config, rank, folder = prepared.settings.trainer.checkpoint, prepared.rank, prepared.folder
    if config is None or not config.is_enabled:
        return None
    saver = Saver(
        folder.checkpoints_in,
        keep=config.keep,
        background=planned.memory.has_checkpoint_copy,
        rank=rank,
        check_owner=folder.check_owner,
        keep_files=folder.push,
    )
    describe = functools.partial(_run_state, _first_state(prepared, planned, built), writer)
    return Checkpoints(saver, config, built.state, describe=describe, rank=rank)


def _first_state(prepared: Prepared, planned: Planned, built: Built) -> RunState:
    """Describe the run before its first step."""
    settings = prepared.settings
    return RunState(
        run=prepared.start.run,
        step=0,
        batch_size=settings.batch_size,
        seed=settings.seed,
        epoch_batches=len(prepared.streams["train"]),
        world_size=prepared.rank.world_size,
        optimizers={"embedding": settings.optimizer.embedding, "dense": settings.optimizer.dense},
        column_bounds=built.state.column_bounds,
        buffers=built.state.buffers,
        progress={},
        plan=plan_json(planned.plan, planned.report),
        config=settings.config,
    )


def _run_state(first: RunState, writer: RunWriter, progress: Progress) -> RunState:
    """Describe the run after the steps that it has trained."""
    return dataclasses.replace(
        first, step=progress.step, progress=progress.to_json(), events=writer.position()
    )
