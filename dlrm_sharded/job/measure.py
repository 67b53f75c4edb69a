"""Measures the embedding cost of a run before it trains."""

from __future__ import annotations

import itertools
import logging

from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.sample_store import SampleStore, conditions_of, sample_of_run
from dlrm_sharded.cost.base import with_assumed_profiles
from dlrm_sharded.datasets.base import check_keys
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job.build import Built
from dlrm_sharded.job.plan import Planned
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.measuring.measure import measure as measure_stages
from dlrm_sharded.model.replicas import replica_part
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import FWD_COMPUTE, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.distributed import Rank, has_core_for_each
from dlrm_sharded.ranks.surroundings import SurroundingsWatch
from dlrm_sharded.runs.terminal import prediction_text

log = logging.getLogger(__name__)


def measure(prepared: Prepared, planned: Planned, built: Built) -> MeasuredCost:
    """Measure the embedding cost of the plan and note it in the journal; a collective."""
    rank = prepared.rank
    watch = SurroundingsWatch()
    measured = measure_embeddings(prepared.settings, rank, planned.task, built)
    core_wait = watch.conclude().core_wait if has_core_for_each(rank) else 0.0
    if rank.is_zero:
        _log_measured(measured, planned.report)
        beside = Disturbance(core_wait, measured.change)
        model = prepared.planner.cost_model if prepared.planner else None
        task = with_assumed_profiles(model, planned.task)
        note_run(prepared.journal, prepared.context, planned.plan, task, measured.cost, beside)
    return measured


def measure_embeddings(
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
    return measure_stages(
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
    journal: SampleStore | None,
    context: RunContext,
    plan: ShardingPlan,
    task: ShardingTask,
    cost: PlanCost,
    beside: Disturbance | None = None,
) -> None:
    """Append the measured plan to the journal of the hardware; rank 0 calls it.

    Runs whose tables or exchanges are not all in fp32 are left out: measured prices are of fp32.

    Args:
        beside: signs of other work while it was measured.
    """
    conditions = conditions_of(context)
    if journal is None or conditions is None:
        return
    run = sample_of_run(plan, task, cost)
    if run is not None and journal.append(conditions, run, beside):
        when = "the next prediction" if journal.outbox is None else "predictions after this sweep"
        log.info("noted in %s, which corrects %s on this hardware", journal.path, when)
        if beside is not None and beside.text is not None:
            log.warning(
                "this run was measured beside other work, so it counts less: %s", beside.text
            )
