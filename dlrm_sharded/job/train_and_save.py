"""Trains a run, and writes its events, its checkpoints and its result."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import yaml

from dlrm_sharded.checkpoint.folder import FOLDER_NAME
from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.datasets.base import encoder_folder
from dlrm_sharded.datasets.encoder import encoder_digest
from dlrm_sharded.files.errors import ConfigError, UnsavedError
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.job.build import Built
from dlrm_sharded.job.choose_plan import Planned
from dlrm_sharded.job.memory_check import used_text
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.runs.result import RunResult, read_result, run_result, write_result
from dlrm_sharded.runs.run_events import HPARAMS, RunWriter
from dlrm_sharded.runs.terminal import closing_text
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.profiler import TRACE_FOLDER
from dlrm_sharded.training.progress import Progress, read_best
from dlrm_sharded.training.training_result import TrainingResult

log = logging.getLogger(__name__)


def train(
    prepared: Prepared, planned: Planned, built: Built, measured: MeasuredCost, progress: Progress
) -> TrainingResult:
    """Train from `progress` to the end; a collective of all ranks."""
    settings, rank = prepared.settings, prepared.rank
    start, folder = prepared.start, prepared.folder
    with RunWriter(
        folder.path,
        enabled=rank.is_zero,
        going_on=start.event_position,
        check_owner=folder.check_owner,
    ) as writer:
        values = (planned.report.made_by, str(settings.batch_size), str(settings.seed))
        text = yaml.safe_dump(dict(settings.config), sort_keys=False)
        writer.config(text, dict(zip(HPARAMS, values, strict=True)))
        writer.plan(
            planned.plan,
            planned.report,
            planned.task,
            measured.cost,
            step=start.step,
            is_new=planned.is_new,
        )
        result = built.trainer(
            settings,
            rank,
            prepared.streams,
            config=settings.trainer,
            log_scalar=writer.scalar,
            checkpoints=_checkpoints(writer, prepared, planned, built),
            start=progress,
            trace_folder=folder.path / TRACE_FOLDER,
        ).run()
        writer.conclude(result)
    if rank.is_zero:
        estimated = planned.memory.estimated_peak_bytes(on_cuda=rank.device.type == "cuda")
        log.info("%s", used_text(estimated, result.peak_gib, result.reserved_gib))
        if (slowed := result.machine_load.slowed_gpu) is not None:
            log.warning("the throughput may be too low: %s", slowed)
    return result


def _checkpoints(
    writer: RunWriter, prepared: Prepared, planned: Planned, built: Built
) -> Checkpoints | None:
    """Return the writer of a run's checkpoints, or None if the run writes none."""
    settings, rank, folder = prepared.settings, prepared.rank, prepared.folder
    config = settings.trainer.checkpoint
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
    optimizers = {"embedding": settings.optimizer.embedding, "dense": settings.optimizer.dense}
    plan = plan_json(planned.plan, planned.report)
    encoder = encoder_folder(settings.dataset)
    model = {
        "num_dense": settings.dataset.num_dense,
        "tables": [
            {
                "name": table.name,
                "num_embeddings": table.num_embeddings,
                "embedding_dim": table.embedding_dim,
                "features": table.feature_names,
            }
            for table in planned.task.tables
        ],
        "encoder": encoder,
        "encoder_digest": None if encoder is None else encoder_digest(Path(encoder)),
    }

    def describe(progress: Progress) -> RunState:
        """Describe the run after the steps that it has trained so far."""
        best = progress.best if settings.trainer.keep_best else None
        return RunState(
            run=prepared.start.run,
            step=progress.step,
            batch_size=settings.batch_size,
            seed=settings.seed,
            epoch_batches=len(prepared.streams["train"]),
            world_size=rank.world_size,
            optimizers=optimizers,
            column_bounds=built.state.column_bounds,
            buffers=built.state.buffers,
            progress=progress.to_json(),
            plan=plan,
            config=settings.config,
            events=writer.position(),
            model=model,
            best_step=None if best is None else best.step,
        )

    return Checkpoints(saver, config, built.state, describe=describe, rank=rank)


def finished_objective(prepared: Prepared) -> float | None:
    """Return the objective of a run that has reached its end; None if something is left to do.

    With another config, such as another sharder, the finished run is measured and evaluated again.
    Rank 0 calls this.
    """
    settings, start, state = prepared.settings, prepared.start, prepared.start.own_state
    if settings.dry_run or state is None or not start.goes_on_alike(settings.config):
        return None
    trainer, result = settings.trainer, read_result(prepared.folder.path)
    is_complete = state.step == trainer.total_steps(len(prepared.streams["train"]))
    has_ended = is_complete or not trainer.is_patient(trainer.first_best(read_best(state.progress)))
    if result is None or result.steps != state.step or not has_ended:
        return None
    log.info(
        "the run in %s has %s, and its result stays; to continue, raise %s",
        prepared.folder.path,
        f"trained all of its {state.step} steps" if is_complete else f"ended at step {state.step}",
        "trainer.num_steps or trainer.num_epochs" if is_complete else "trainer.patience",
    )
    return _objective(result, settings.objective)


def conclude(
    prepared: Prepared, planned: Planned, measured: MeasuredCost, trained: TrainingResult
) -> float:
    """Write result.json; return the objective, or nan if the run has no value for it.

    Rank 0 calls this.

    Raises:
        LostFolderError: another job has taken over the run's folder.
        UnsavedError: the result or the last checkpoint could not be written.
    """
    settings, device, folder = prepared.settings, prepared.rank.device, prepared.folder
    on_cuda = device.type == "cuda"
    result = run_result(
        planned.plan,
        planned.report,
        measured,
        trained,
        device=device_name(device),
        batch_size=settings.batch_size,
        seed=settings.seed,
        ranks_per_host=planned.task.topology.ranks_per_host,
        interruptions=prepared.start.num_interruptions,
        estimated_peak_gib=planned.memory.estimated_peak_bytes(on_cuda=on_cuda) / GIB,
    )
    log.info(
        "%s",
        closing_text(
            planned.report,
            measured.cost,
            trained,
            folder.path,
            host=folder.host,
            checkpoints_in=_checkpoints_in(prepared),
        ),
    )
    try:
        folder.check_owner()
        write_result(folder.path, result)
        folder.push()
    except (ConfigError, OSError) as error:
        raise UnsavedError(f"the training is finished, but its result is lost: {error}") from error
    if trained.unsaved is not None:
        raise UnsavedError(
            "the training is finished, but its last checkpoint could not be written: "
            f"{trained.unsaved}"
        )
    return _objective(result, settings.objective)


def _checkpoints_in(prepared: Prepared) -> str | None:
    """Return where the checkpoints of a run are; None if it writes none."""
    config, folder = prepared.settings.trainer.checkpoint, prepared.folder
    if config is None or not config.is_enabled:
        return None
    place = str(folder.checkpoints_in / FOLDER_NAME)
    return place if folder.copy is None else f"{place}, beside copies of the results"


def _objective(result: RunResult, key: str) -> float:
    value = getattr(result, key)
    return math.nan if value is None else float(value)
