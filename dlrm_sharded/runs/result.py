"""result.json: the results of a run, declared once for writing and reading them.

Every field of `RunResult` is a key of the file.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Int, Text
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.plans.cost_provenance import EXTRAPOLATED, CostProvenance
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.ranks.gpus import GpuStates

if TYPE_CHECKING:  # both load torch
    from dlrm_sharded.measuring.measure import MeasuredCost
    from dlrm_sharded.training.training_result import TrainingResult

FILE_NAME = "result.json"

MAX_FIGURE = 1e30
"""Larger than any real figure, and small enough that means and plots of figures are finite."""

Finite = Annotated[float, Meta(ge=-MAX_FIGURE, le=MAX_FIGURE)]

Objective = Annotated[Finite, "objective"]
"""A figure that a sweep can optimize."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of a run; unknown values are None.

    Args:
        device: name of the hardware.
        pipeline, compile_mode, dense_graph: `StepOptions` of the steps after the warm-up.
        stages_ms: time of each stage, the maximum over ranks; they sum to the critical path.
        per_rank: measured costs in rank order.
        spread, launch_ms: see `MeasuredCost`.
        prices: provenance of the predicted costs, see `CostProvenance.short_text`.
        prices_digest: digest of the cost model, see `MadeFrom`; if it differs between runs, their
            predictions are not comparable.
        expected_error: relative error to expect of `predicted_critical_path_ms`.
        samples_per_s_p10: throughput that nine tenths of the steps exceed.
        samples_per_s_overall: throughput of the whole loop, see `TrainingResult`.
        hosts, began_s, core_wait: load during training, see `MachineLoad`.
        gpus: states of each rank's GPU around the measurements "embedding_cost" and "training".
        ids_out_of_range: number of ids beyond each table's rows, for which row 0 was looked up.
        steps: number of steps of the whole training run, including those before an interruption.
        interruptions: how often the run was interrupted and restarted.
    """

    sharder: Text | None = None
    costs: Text | None = None
    world_size: Int | None = None
    ranks_per_host: Int | None = None
    batch_size: Int | None = None
    device: Text | None = None
    pipeline: Text | None = None
    compile_mode: Text | None = None
    dense_graph: bool | None = None
    embedding_cost_ms: Objective | None = None
    critical_path_ms: Objective | None = None
    stages_ms: Mapping[str, Finite] | None = None
    input_dist_ms: Finite | None = None
    per_rank: Annotated[tuple[StageCost, ...], Meta(min_length=1)] | None = None
    imbalance: Objective | None = None
    spread: Mapping[str, Finite] | None = None
    launch_ms: Mapping[str, Finite] | None = None
    measured_iterations: Int | None = None
    predicted_ms: Finite | None = None
    predicted_critical_path_ms: Finite | None = None
    predicted_stages_ms: Mapping[str, Finite] | None = None
    predicted_input_dist_ms: Finite | None = None
    prices: Text | None = None
    prices_digest: Text | None = None
    expected_error: Finite | None = None
    lower_bound_ms: Finite | None = None
    gap: Finite | None = None
    plan_solve_s: Finite | None = None
    samples_per_s: Objective | None = None
    samples_per_s_p10: Objective | None = None
    samples_per_s_overall: Objective | None = None
    step_ms: Objective | None = None
    loss: Objective | None = None
    auroc: Objective | None = None
    normalized_entropy: Objective | None = None
    peak_gib: Objective | None = None
    reserved_gib: Finite | None = None
    estimated_peak_gib: Finite | None = None
    hosts: Mapping[str, Finite] | None = None
    began_s: Finite | None = None
    core_wait: Finite | None = None
    gpus: Mapping[str, tuple[GpuStates, ...]] | None = None
    ids_out_of_range: Mapping[str, Int] | None = None
    steps: Int | None = None
    interruptions: Int | None = None
    versions: Mapping[str, str] | None = None
    commit: Text | None = None
    seed: Int | None = None

    @property
    def metrics(self) -> dict[str, float | None]:
        """Figures by name, with one for every stage.

        `<stage>_ms` is the maximum over ranks, so that the stages sum to the critical path; the
        times `slowest_rank_<stage>_ms` sum to the embedding cost.
        """
        figures: dict[str, float | None] = {
            key: getattr(self, key) for key, form in _FORMS.items() if form in (Finite, Objective)
        }
        for prefix in ("", "predicted_"):
            stages_ms = getattr(self, f"{prefix}stages_ms") or {}
            figures |= {f"{prefix}{stage}_ms": stages_ms.get(stage) for stage in STAGES}
        slowest = max(self.per_rank or (), key=lambda rank: rank.total_ms, default=None)
        for stage in STAGES:
            ms = None if slowest is None else slowest.stage_ms(stage)
            figures[f"slowest_rank_{stage}_ms"] = ms
        return figures


_FORMS = {
    key: typing.get_args(hint)[0]
    for key, hint in typing.get_type_hints(RunResult, include_extras=True).items()
}
"""Types of the keys' values, if the values are known."""

METRICS = tuple(RunResult().metrics)
"""Names of a run's figures."""

OBJECTIVES = tuple(key for key, form in _FORMS.items() if form == Objective)
"""Keys of result.json that a sweep can optimize."""


OF_TRAINING = (
    *("samples_per_s", "samples_per_s_p10", "samples_per_s_overall", "step_ms", "loss"),
    *("peak_gib", "reserved_gib", "ids_out_of_range"),
)
"""Keys whose values come from a `TrainingResult`."""


def run_result(
    plan: ShardingPlan,
    report: PlanReport,
    measured: MeasuredCost,
    training: TrainingResult,
    **of_run: Any,
) -> RunResult:
    """Gather the results of a run.

    Args:
        of_run: further values, by key.
    """
    cost, predicted, provenance = measured.cost, report.cost, report.provenance
    evaluation = training.evaluation
    gpus = {"embedding_cost": measured.gpus, "training": training.machine_load.gpus}
    return RunResult(
        world_size=plan.world_size,
        **{key: getattr(report, key) for key in ("sharder", "costs", "lower_bound_ms", "gap")},
        plan_solve_s=report.solve_s,
        embedding_cost_ms=cost.cost_ms,
        **_times_of(cost),
        per_rank=cost.per_rank,
        imbalance=cost.imbalance,
        spread=measured.spread,
        launch_ms=measured.launch_ms or None,
        measured_iterations=measured.iterations,
        predicted_ms=None if predicted is None else predicted.cost_ms,
        **({} if predicted is None else _times_of(predicted, "predicted_")),
        prices=None if provenance is None else _prices_text(provenance),
        expected_error=None if provenance is None else provenance.error,
        prices_digest=None if report.made_from is None else report.made_from.prices_digest,
        **{key: getattr(training, key) for key in OF_TRAINING},
        steps=training.num_steps,
        auroc=evaluation.auroc,
        normalized_entropy=evaluation.normalized_entropy,
        **dataclasses.asdict(training.machine_load)
        | {"gpus": gpus if any(gpus.values()) else None},
        **dataclasses.asdict(training.options),
        versions=versions(),
        commit=commit(),
        **of_run,
    )


def _prices_text(provenance: CostProvenance) -> str:
    return provenance.short_text + f", {EXTRAPOLATED}" * provenance.is_extrapolated


def _times_of(cost: PlanCost, prefix: str = "") -> dict[str, Any]:
    """Return the keys that both measured and predicted costs have."""
    return {
        f"{prefix}critical_path_ms": cost.critical_path_ms,
        f"{prefix}stages_ms": {stage: cost.stage_max_ms(stage) for stage in STAGES},
        f"{prefix}input_dist_ms": cost.input_dist_max_ms,
    }


def write_result(folder: Path, result: RunResult) -> None:
    """Write result.json, with null for values that are unknown or not finite."""
    usable = _usable(dataclasses.asdict(result))
    write_json(folder / FILE_NAME, dataclasses.asdict(usable))


def read_result(folder: Path) -> RunResult | None:
    """Return the result of the run in a folder; None if the folder has none.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    path = folder / FILE_NAME
    return _usable(read_json_object(path, noun="result")) if path.exists() else None


def _usable(fields: Mapping[str, Any]) -> RunResult:
    """Return the usable fields of a file, which is of any version and may be damaged."""
    found: dict[str, Any] = {}
    for key, form in _FORMS.items():
        with suppress(DataError):
            found[key] = read_form(fields.get(key), form, name=key, may_have_others=True)
    if not all(math.isfinite(rank.total_ms) for rank in found.get("per_rank", ())):
        del found["per_rank"]
    return RunResult(**found)


def setting_text(setting: Mapping[str, str]) -> str:
    """Return overrides as on the command line, in the order of their keys."""
    return " ".join(f"{key}={setting[key]}" for key in sorted(setting))
