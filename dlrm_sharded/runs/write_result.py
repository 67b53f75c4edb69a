"""What a run came to: result.json for programs, a closing summary for people."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from dlrm_sharded.calibration.measure import MeasuredCost
from dlrm_sharded.explain.text import difference
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import STAGES, PlanCost
from dlrm_sharded.plan_report import PlanReport
from dlrm_sharded.provenance import commit, device_name, versions
from dlrm_sharded.training.trainer import TrainingResult

OBJECTIVES = (
    "samples_per_s",
    "samples_per_s_p10",
    "step_ms",
    "embedding_cost_ms",
    "critical_path_ms",
    "imbalance",
    "loss",
    "auroc",
    "normalized_entropy",
    "peak_gib",
)
"""Keys of result.json that a sweep can optimise."""


def result_json(
    plan: ShardingPlan,
    report: PlanReport,
    measured: MeasuredCost,
    result: TrainingResult,
    *,
    device: torch.device,
    batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """The form of result.json; what is not known is None."""
    predicted = report.cost
    return {
        "sharder": report.sharder,
        "world_size": plan.world_size,
        "batch_size": batch_size,
        "device": device_name(device),
        "embedding_cost_ms": measured.cost.cost_ms,
        "critical_path_ms": measured.cost.critical_path_ms,
        "stages_ms": _stages_ms(measured.cost),
        "input_dist_ms": measured.cost.input_dist_max_ms,
        "per_rank": [dataclasses.asdict(rank) for rank in measured.cost.per_rank],
        "imbalance": measured.cost.imbalance,
        "spread": measured.spread,
        "measured_iterations": measured.iterations,
        "predicted_ms": None if predicted is None else predicted.cost_ms,
        "predicted_critical_path_ms": None if predicted is None else predicted.critical_path_ms,
        "predicted_stages_ms": None if predicted is None else _stages_ms(predicted),
        "predicted_input_dist_ms": None if predicted is None else predicted.input_dist_max_ms,
        "lower_bound_ms": report.lower_bound_ms,
        "gap": report.gap,
        "plan_solve_s": report.solve_s,
        "samples_per_s": _known(result.samples_per_s),
        "samples_per_s_p10": _known(result.samples_per_s_p10),
        "step_ms": _known(result.step_ms),
        "loss": _known(result.loss),
        "auroc": result.evaluation.auroc,
        "normalized_entropy": result.evaluation.normalized_entropy,
        "peak_gib": result.peak_gib,
        "steps": result.num_steps,
        "versions": versions(),
        "commit": commit(),
        "seed": seed,
    }


def prediction(predicted: PlanCost, measured: PlanCost) -> str:
    """What was predicted, and by how much it is off, for the terminal."""

    def beside(predicted_ms: float, measured_ms: float, unit: str = "") -> str:
        return f"{predicted_ms:.2f}{unit} ({difference(predicted_ms, measured_ms)})"

    stages = ", ".join(
        f"{stage} {beside(predicted.stage_max_ms(stage), measured.stage_max_ms(stage))}"
        for stage in STAGES
    )
    return (
        f"predicted {beside(predicted.cost_ms, measured.cost_ms, ' ms')}, critical path "
        f"{beside(predicted.critical_path_ms, measured.critical_path_ms, ' ms')}: {stages}"
    )


def summary(
    report: PlanReport, measured: MeasuredCost, result: TrainingResult, run_dir: Path
) -> str:
    """A few lines for the terminal."""
    cost = measured.cost
    stages = ", ".join(f"{stage} {cost.stage_max_ms(stage):.2f}" for stage in STAGES)
    predicted = "" if report.cost is None else f"predicted {report.cost.cost_ms:.2f}; "
    evaluation = result.evaluation
    quality = "no validation"
    if evaluation.auroc is not None and evaluation.normalized_entropy is not None:
        quality = (
            f"AUROC {evaluation.auroc:.4f}, normalized entropy "
            f"{evaluation.normalized_entropy:.4f} on {evaluation.num_samples:,} samples"
        )
    return "\n".join(
        [
            f"done: sharder {report.sharder}, {len(cost.per_rank)} ranks, {result.num_steps} steps",
            f"  embedding cost   {cost.cost_ms:.2f} ms ({predicted}imbalance {cost.imbalance:.2f})",
            f"  critical path    {cost.critical_path_ms:.2f} ms ({stages})",
            f"  ids redistributed in {cost.input_dist_max_ms:.2f} ms",
            f"  throughput       {_throughput(result)}",
            f"  loss {result.loss:.4f}, {quality}",
            f"  results in       {run_dir}",
            f"  TensorBoard      tensorboard --logdir {run_dir.parent}",
        ]
    )


def _throughput(result: TrainingResult) -> str:
    if not math.isfinite(result.samples_per_s):
        return f"unknown: all {result.num_steps} steps were warm-up (trainer.num_warmup_steps)"
    return (
        f"{result.samples_per_s:,.0f} samples/s ({result.step_ms:.1f} ms a step; "
        f"slowest tenth {result.samples_per_s_p10:,.0f} samples/s)"
    )


def _stages_ms(cost: PlanCost) -> dict[str, float]:
    return {stage: cost.stage_max_ms(stage) for stage in STAGES}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
