"""Measures the embedding cost of a run before it trains."""

from __future__ import annotations

import logging

import torch
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.calibration.measure import MeasuredCost, measure
from dlrm_sharded.calibration.picture import conditions_of
from dlrm_sharded.calibration.run_journal import RunJournal, measured_run
from dlrm_sharded.commands.run_setup import RunSetup
from dlrm_sharded.datasets.base import check_batch
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.model.replicas import replica_part
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.runs.terminal import prediction_text, surprise_text

log = logging.getLogger(__name__)


def measure_run(
    setup: RunSetup,
    report: PlanReport,
    task: ShardingTask,
    model: torch.nn.Module,
    optimizer: CombinedOptimizer,
    rank: Rank,
) -> MeasuredCost:
    """Measure the embedding cost on the first batches of the training split."""
    num_batches = min(setup.measure.num_batches, setup.dataset.num_batches("train"))
    batches = [
        setup.dataset.batch("train", i, rank=rank.rank, world_size=rank.world_size).to(rank.device)
        for i in range(num_batches)
    ]
    for batch in batches:
        check_batch(batch, task.tables)
    measured = measure(
        sharded_embeddings(model),
        [batch.sparse_features for batch in batches],
        setup.measure,
        replica_optimizer=replica_part(optimizer),
    )
    if rank.is_zero:
        log.info(
            "embedding cost %.2f ms, critical path %.2f ms, imbalance %.2f "
            "(median of %d; interquartile range of forward computation %.0f %%)",
            measured.cost.cost_ms,
            measured.cost.critical_path_ms,
            measured.cost.imbalance,
            measured.iterations,
            100 * measured.spread["fwd_compute"],
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
            log.info("%s", prediction_text(report.cost, measured.cost))
            warning = surprise_text(report, measured.cost)
            if warning is not None:
                log.warning("%s", warning)
    return measured


def note_run(
    journal: RunJournal | None,
    context: RunContext,
    plan: ShardingPlan,
    task: ShardingTask,
    cost: PlanCost,
) -> None:
    """Append the measured plan to the journal of the hardware; rank 0 calls it.

    Runs whose tables or exchanges are not all in fp32 are left out: measured prices are of fp32.
    """
    conditions = conditions_of(context)
    if journal is None or conditions is None:
        return
    if plan.half_tables() or not plan.exchange_precision.is_exact:
        return
    run = measured_run(plan, task, cost)
    if run is not None and journal.append(conditions, run):
        log.info("noted in %s, which corrects the next prediction on this hardware", journal.path)
