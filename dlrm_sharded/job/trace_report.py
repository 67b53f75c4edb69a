"""Says where the traced steps of a run go: in the log, in TensorBoard and in trace.json.gz."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import INPUT_DIST, STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.runs.run_events import RunWriter
from dlrm_sharded.step.parts import DENSE_BACKWARD, DENSE_FORWARD, EXCHANGES, PARTS, WAITING
from dlrm_sharded.step.timeline import Times
from dlrm_sharded.tracing.findings import find
from dlrm_sharded.tracing.perfetto import write_trace
from dlrm_sharded.tracing.recorded import break_down
from dlrm_sharded.tracing.recorded_spans import recorded_spans, rows
from dlrm_sharded.tracing.step_tracer import Trace
from dlrm_sharded.tracing.trace_text import finding_lines, summary_lines, table

log = logging.getLogger(__name__)

TRACE_FILE = "trace.json.gz"
NUM_TABLES = 3
"""Number of tables that are named for a rank."""


def report_trace(
    trace: Trace,
    *,
    run_dir: Path,
    plan: ShardingPlan,
    report: PlanReport,
    task: ShardingTask,
    measured: PlanCost,
    writer: RunWriter,
) -> None:
    """Explain the trace of a run and write it; rank 0 calls this."""
    steps = break_down(trace.ranks)
    findings = find(steps, trace.ranks, _expected_ms(trace, measured))
    lines = [
        *summary_lines(steps, clock_uncertainty_ms=trace.clock_uncertainty_ms),
        *finding_lines(findings, lambda rank: heaviest_tables(rank, plan, report, task)),
    ]
    last_step = trace.first_step + len(trace.ranks[0].steps) - 1
    for line in lines:
        log.info("trace of steps %d to %d: %s", trace.first_step, last_step, line)
    breakdown = steps.breakdown
    scalars = {f"trace/{part}_ms": breakdown.mean_ms(part) for part in PARTS}
    scalars["trace/step_ms"] = breakdown.step_ms
    scalars["trace/waiting_ms/max"] = float(breakdown.parts_ms[WAITING].max())
    scalars["trace/exposed_ms"] = sum(breakdown.mean_ms(part) for part in EXCHANGES)
    explained = "\n".join([*(f"- {line}" for line in lines), "", table(steps, trace.ranks)])
    writer.trace(breakdown, scalars, explained, step=last_step)
    spans = recorded_spans(steps, trace.ranks, first_step=trace.first_step)
    try:
        write_trace(run_dir / TRACE_FILE, spans, streams=rows(spans))
    except OSError as error:
        log.warning(
            "the trace is lost: %s cannot be written: %s", run_dir / TRACE_FILE, error.strerror
        )


def _expected_ms(trace: Trace, measured: PlanCost) -> dict[str, Times]:
    """Return what was measured of parts by themselves, [W] each."""
    expected = {
        stage: np.array([rank.stage_ms(stage) for rank in measured.per_rank]) for stage in STAGES
    }
    if measured.input_dist_ms is not None:
        expected[INPUT_DIST] = np.array(measured.input_dist_ms)
    forward, backward = zip(*trace.dense_ms, strict=True)
    return expected | {DENSE_FORWARD: np.array(forward), DENSE_BACKWARD: np.array(backward)}


def heaviest_tables(
    rank: int, plan: ShardingPlan, report: PlanReport, task: ShardingTask
) -> Sequence[str]:
    """Return the tables that weigh most on a rank.

    They do so by the predicted cost of their shards, or by the number of weights that a sample
    looks up there, if the rank has no prediction.
    """
    bounding = report.diagnosis.bounding if report.diagnosis else ()
    for priced in bounding:
        if priced.rank == rank:
            names = [shard.shard.table for shard in priced.shards]
            return list(dict.fromkeys(names))[:NUM_TABLES]
    tables = {table.name: table for table in task.tables}
    weights: dict[str, float] = {}
    for shard in plan.shards:
        if shard.rank == rank:
            table = tables[shard.table]
            share = shard.num_rows / table.num_embeddings
            weight = table.pooling_factor * shard.num_cols * share
            weights[shard.table] = weights.get(shard.table, 0.0) + weight
    return sorted(weights, key=lambda name: -weights[name])[:NUM_TABLES]
