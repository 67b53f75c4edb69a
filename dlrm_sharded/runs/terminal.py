"""Texts that a run prints in the terminal: the error of the prediction, and its results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_sharded.explain.text import difference, rounding
from dlrm_sharded.files.text_table import quantity
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport

if TYPE_CHECKING:  # loads torch
    from dlrm_sharded.training.training_result import TrainingResult

CLOCK_ERROR = 0.15
"""Relative error of a single measurement, which no cost model can predict."""

ADVICE = "`dlrm-calibrate` measures this hardware in 2 minutes, when nothing else runs on it"


def prediction_text(report: PlanReport, measured: PlanCost) -> tuple[str, bool]:
    """Return a text of the predicted cost and its errors, and whether these exceed the expected."""
    assert report.cost is not None
    predicted, found = (
        {"cost": cost.cost_ms, "critical path": cost.critical_path_ms}
        | {stage: cost.stage_max_ms(stage) for stage in STAGES}
        for cost in (report.cost, measured)
    )
    errors = [
        f"{name} {ms:.2f} ms ({difference(ms, found[name])})" for name, ms in predicted.items()
    ]
    text = f"predicted {', '.join(errors)}"
    least_ms, most_ms = sorted((predicted["critical path"], found["critical path"]))
    expected = None if report.provenance is None else report.provenance.error
    if expected is None or most_ms <= least_ms * (1 + max(expected, CLOCK_ERROR)):
        return text, False
    apart = f"a factor of {most_ms / least_ms:.2f} apart, beyond the expected {1 + expected:.2f}"
    return f"{text}; the critical paths are {apart}; {ADVICE}", True


def closing_text(
    report: PlanReport,
    cost: PlanCost,
    training: TrainingResult,
    run_dir: Path,
    *,
    host: str | None = None,
    checkpoints_in: str | None = None,
) -> str:
    """Return the results of a run in a few lines.

    Args:
        cost: measured cost.
        host: the host that has the folder, if others may lack it; None if all hosts see it.
        checkpoints_in: where the checkpoints are; None if there are none.
    """
    stages = ", ".join(f"{stage} {cost.stage_max_ms(stage):.2f}" for stage in STAGES)
    predicted = "" if report.cost is None else f"predicted {report.cost.cost_ms:.2f}; "
    evaluation = training.evaluation
    quality = str(evaluation) if evaluation.num_samples else "none"
    if evaluation.num_samples and evaluation.auroc is None:
        quality += ", which have one label"
    if training.best is not None:
        quality += f", {training.best}"
    lines = [
        f"done: sharder {report.made_by}, {quantity(len(cost.per_rank), 'rank')}, "
        f"{quantity(training.num_steps, 'step')}{rounding(report.exchange_precision)}",
        f"  embedding cost   {cost.cost_ms:.2f} ms ({predicted}imbalance {cost.imbalance:.2f})",
        f"  critical path    {cost.critical_path_ms:.2f} ms ({stages})",
    ]
    lines += [
        f"  ids redistributed in {cost.input_dist_max_ms:.2f} ms",
        f"  throughput       {_throughput(training)}",
        *(
            f"  ids beyond rows  {count:,} of {table}: row 0 was looked up for them"
            for table, count in sorted(training.ids_out_of_range.items())
        ),
        f"  training loss    {training.loss:.4f} in the last steps",
        f"  validation       {quality}",
        f"  results in       {run_dir}{'' if host is None else f' on host {host}'}",
    ]
    if checkpoints_in is not None:
        lines.append(f"  checkpoints in   {checkpoints_in}")
    lines.append(f"  TensorBoard      tensorboard --logdir {run_dir.parent}")
    if report.caveat is not None:
        lines.append(f"  caveat: {report.caveat}")
    return "\n".join(lines)


def _throughput(training: TrainingResult) -> str:
    if not math.isfinite(training.samples_per_s):
        return "unknown: no step after the warm-up (trainer.num_warmup_steps) was timed"
    return (
        f"{training.samples_per_s:,.0f} samples/s ({training.step_ms:.1f} ms a step; "
        f"slowest tenth {training.samples_per_s_p10:,.0f}, "
        f"with all stalls {training.samples_per_s_overall:,.0f} samples/s)"
    )
