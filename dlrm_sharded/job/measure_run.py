"""Measures a run: its embedding cost before training, and all of it again in rounds of a sweep.

Runs that are measured at different times are measured under different load. So every round of a
sweep builds all runs again by their plans, in another order, and each takes a short segment of
steps. Weights are initialized anew, because no time depends on them. Nothing in the run's folder
changes, except that each round adds a line to `runs.rounds.FILE_NAME`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from pathlib import Path

import torch

from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.sample_store import SampleStore, conditions_of, sample_of_run
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.cost.base import with_assumed_profiles
from dlrm_sharded.datasets.base import SPLITS, check_keys
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job.build import Built, build
from dlrm_sharded.job.choose_plan import Planned
from dlrm_sharded.job.owned_folder import owned_folder
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.measuring.measure import MeasuredCost, measure
from dlrm_sharded.model.replicas import replica_part
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan import read_plan, with_precisions
from dlrm_sharded.plans.plan_cost import FWD_COMPUTE
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask, read_task
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.distributed import Rank, has_core_for_each
from dlrm_sharded.ranks.machine_load import LoadWatch, MachineLoad
from dlrm_sharded.runs.rounds import Round, rounds_file
from dlrm_sharded.runs.terminal import prediction_text

log = logging.getLogger(__name__)


def measure_cost(prepared: Prepared, planned: Planned, built: Built) -> MeasuredCost:
    """Measure the embedding cost of the plan and record it in the store; a collective.

    It is measured once more if a GPU was throttled or changed its clocks.
    """
    rank = prepared.rank

    def measured_once() -> tuple[MeasuredCost, MachineLoad]:
        watch = LoadWatch(rank.device)
        measured = _measure_embeddings(prepared.settings, rank, planned.task, built)
        found = watch.conclude()
        return dataclasses.replace(measured, gpus=found.gpus), found

    measured, found = measured_once()
    if found.slowed_gpu is not None:
        if rank.is_zero:
            log.warning("the embedding cost is measured again: %s", found.slowed_gpu)
        measured, found = measured_once()
    core_wait = found.core_wait if has_core_for_each(rank) else 0.0
    if rank.is_zero:
        _log_measured(measured, planned.report)
        model = prepared.planner.cost_model if prepared.planner else None
        task = with_assumed_profiles(model, planned.task)
        sample = sample_of_run(planned.plan, task, measured.cost)
        other_work = Disturbance(core_wait, measured.change)
        store = prepared.store if found.slowed_gpu is None else None
        note_run(store, prepared.context, sample, other_work)
    return measured


def measure_round(
    settings: JobSettings,
    rank: Rank,
    run_dir: Path,
    number: int,
    place: int,
    attempt: int,
    *,
    num_steps: int,
) -> None:
    """Measure the run in a folder again, under its plan; a collective of all ranks.

    Args:
        number, place, attempt: `round`, `place` and `attempt` of `Round`.
        num_steps: number of measured steps, without the warm-up.

    Raises:
        ConfigError: the folder has no plan, or another job owns it.
    """
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = settings.trainer.tf32
    with owned_folder(run_dir, rank) as folder:
        with all_or_none():
            plan = read_plan(run_dir / "plan.json")
            task = with_precisions(read_task(run_dir / "task.json"), plan)
            names = {table.name: table.features for table in settings.dataset.tables}
            task = task.with_values(features=names)
            streams = {split: settings.stream(split, rank) for split in SPLITS}
        built = build(settings, rank, plan, task)
        embeddings = _measure_embeddings(settings, rank, task, built)
        config = dataclasses.replace(
            settings.trainer,
            num_steps=settings.trainer.warmup_steps(rank.device) + num_steps,
            eval_every_steps=None,
            num_eval_batches=0,
            keep_best=None,
            patience=None,
            trace=False,
            checkpoint=None,
        )
        trained = built.trainer(
            settings, rank, streams, config=config, log_scalar=lambda *_: None
        ).run()
        with all_or_none():
            if rank.is_zero:
                folder.check_owner()
                cost_ms, samples_per_s = embeddings.cost.cost_ms, trained.samples_per_s
                found = Round(
                    round=number,
                    place=place,
                    embedding_cost_ms=cost_ms,
                    spread=max(embeddings.spread.values(), default=0.0),
                    step_ms=trained.step_ms,
                    step_spread=samples_per_s / trained.samples_per_s_p10 - 1,
                    samples_per_s=samples_per_s,
                    **dataclasses.asdict(trained.machine_load),
                    seconds=time.perf_counter() - began,
                    attempt=attempt,
                )
                rounds_file(run_dir).append(dataclasses.asdict(found))
                text = "round %d: embedding cost %.2f ms, %.0f samples/s"
                log.info(text, number + 1, cost_ms, samples_per_s)


def _measure_embeddings(
    settings: JobSettings, rank: Rank, task: ShardingTask, built: Built
) -> MeasuredCost:
    """Measure on the first batches of the training split; a collective of all ranks."""
    num_batches = min(settings.measure.num_batches, settings.dataset.num_batches("train"))
    with all_or_none():
        stream = settings.stream("train", rank)
        batches = list(itertools.islice(stream, num_batches))
        check_keys(batches[0], task.tables)
        for number, fault in stream.check.take(num_batches):
            if fault.is_fatal:
                raise DataError(f"{fault.text}, in training batch {number + 1}")
    return measure(
        sharded_embeddings(built.model),
        [batch.sparse_features.to(rank.device) for batch in batches],
        settings.measure,
        replica_optimizer=replica_part(built.optimizer),
    )


def _log_measured(measured: MeasuredCost, report: PlanReport) -> None:
    log.info(
        "embedding cost %.2f ms, critical path %.2f ms, imbalance %.2f "
        "(median of %d; interquartile range of forward computation %.0f %%)",
        measured.cost.cost_ms,
        measured.cost.critical_path_ms,
        measured.cost.imbalance,
        measured.iterations,
        100 * measured.spread[FWD_COMPUTE],
    )
    if measured.launch_ms:
        log.info(
            "host time to launch the stages, which is not in their times: %s",
            ", ".join(f"{stage} {ms:.2f} ms" for stage, ms in measured.launch_ms.items()),
        )
    if measured.exposed:
        log.warning(
            "the times of %s contain host time: the host is slow, or waits within them",
            ", ".join(measured.exposed),
        )
    if report.cost is not None:
        text, is_surprise = prediction_text(report, measured.cost)
        log.log(logging.WARNING if is_surprise else logging.INFO, "%s", text)


def note_run(
    store: SampleStore | None, context: RunContext, run: Sample | None, other_work: Disturbance
) -> None:
    """Append a measured run to the store of the hardware; rank 0 calls this.

    Args:
        run: the sample; None if samples cannot express the run, see `sample_of_run`.
        other_work: signs of other work while the plan was measured.
    """
    conditions = conditions_of(context)
    if store is None or conditions is None or run is None:
        return
    if store.append(conditions, run, other_work):
        when = "the next prediction" if store.staged is None else "predictions after this sweep"
        text = "wrote the measurement to %s; it corrects %s of cost_model=learned on this hardware"
        log.info(text, store.path, when)
        if other_work.text is not None:
            log.warning("this run was measured under load, so it counts less: %s", other_work.text)
