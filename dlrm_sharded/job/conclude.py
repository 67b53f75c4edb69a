"""Writes the result of a run."""

from __future__ import annotations

import logging
import math

from dlrm_sharded.checkpoint.folder import FOLDER_NAME
from dlrm_sharded.files.errors import ConfigError, UnsavedError
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.job.plan import Planned
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.runs.result import RunResult, read_result, run_result, write_result
from dlrm_sharded.runs.terminal import closing_text
from dlrm_sharded.training.training_result import TrainingResult

log = logging.getLogger(__name__)


def finished_objective(prepared: Prepared) -> float | None:
    """Return the objective of a run that had reached its end; None if something is left to do.

    Under another config, such as another sharder, the end is measured and evaluated again.
    """
    return on_rank_zero(lambda: _finished_objective(prepared))


def _finished_objective(prepared: Prepared) -> float | None:
    settings, start = prepared.settings, prepared.start
    num_steps = settings.trainer.total_steps(len(prepared.streams["train"]))
    if settings.dry_run or start.resumed is None or not start.goes_on_alike(settings.config):
        return None
    result = read_result(prepared.folder.path)
    if result is None or not result.steps == start.step == num_steps:
        return None
    log.info(
        "the run in %s has trained all of its %d steps, and its result stays; to go on, raise "
        "trainer.num_steps or trainer.num_epochs",
        prepared.folder.path,
        num_steps,
    )
    return _objective(result, settings.objective)


def conclude(
    prepared: Prepared, planned: Planned, measured: MeasuredCost, trained: TrainingResult
) -> float:
    """Write result.json on rank 0; return the objective, or nan if the run has no value for it.

    Raises:
        LostFolderError: another job has taken over the run's folder.
        UnsavedError: the result or the last checkpoint could not be written.
    """
    return on_rank_zero(lambda: _conclude(prepared, planned, measured, trained))


def _conclude(
    prepared: Prepared, planned: Planned, measured: MeasuredCost, trained: TrainingResult
) -> float:
    settings, device, folder = prepared.settings, prepared.rank.device, prepared.folder
    on_cuda = device.type == "cuda"
    result = run_result(
        planned.plan,
        planned.report,
        measured,
        trained,
        device=device_name(device),
        pipeline=settings.trainer.pipeline_on(device),
        batch_size=settings.batch_size,
        seed=settings.seed,
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
            on_cuda=on_cuda,
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
