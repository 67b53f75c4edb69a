"""result.json: the results of a run, declared once for writing and reading them.

Every field of `RunResult` is a key of the file.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.step.prediction import StepPrediction

if TYPE_CHECKING:  # both load torch
    from dlrm_sharded.calibration.measure import MeasuredCost
    from dlrm_sharded.training.trainer import TrainingResult

FILE_NAME = "result.json"

Setting = tuple[tuple[str, str], ...]
"""Pairs of (key, value), in order of keys."""


def known_text(value: object) -> str | None:
    """Return the value if it is a string that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def known_number(value: object) -> float | None:
    """Return the value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def known_count(value: object) -> int | None:
    """Return the value if it is an integer of 64 bits, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 2**63 else None


def _known_numbers(value: object) -> dict[str, float] | None:
    if not isinstance(value, dict):
        return None
    numbers = {str(key): known_number(number) for key, number in value.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def _known_texts(value: object) -> dict[str, str] | None:
    if not isinstance(value, dict):
        return None
    return {str(key): str(text) for key, text in value.items()}


def _known_ranks(value: object) -> tuple[StageCost, ...] | None:
    """Return the costs of all ranks; None if a time of one is not known."""
    if not isinstance(value, list) or not value:
        return None
    ranks = [_known_numbers(rank) or {} for rank in value]
    try:
        stages_ms = {stage: [rank[f"{stage}_ms"] for rank in ranks] for stage in STAGES}
    except KeyError:
        return None
    return PlanCost.from_stages(stages_ms, input_dist_ms=None).per_rank


def _key(read: Callable[[object], Any], *, objective: bool = False) -> Any:
    """Declare a key of result.json.

    Args:
        read: returns the value if it has the right kind, else None. Files of earlier versions lack
            keys, and broken files may have any values.
        objective: whether a sweep can optimize it.
    """
    return dataclasses.field(default=None, metadata={"read": read, "objective": objective})


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Hardware and software that figures depend on; runs are compared within one platform only."""

    world_size: int | None = None
    device: str | None = None
    versions: Setting = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Results of a run; a value is None if it is not known.

    Args:
        device: name of the hardware.
        stages_ms: time of each stage, the max over ranks; they sum to the critical path.
        per_rank: measured costs in rank order.
        spread, launch_ms: see `MeasuredCost`.
        prices: what the prices of the prediction are, see `Standing.short_text`.
        expected_error: of `predicted_critical_path_ms`, relative.
        predicted_step_error: expected error of `predicted_step_ms`, relative.
        predicted_parts_ms: parts of the predicted step, averaged over all ranks, see `step.parts`;
            they sum to it.
        samples_per_s_p10: throughput that nine tenths of the steps exceed.
        samples_per_s_overall: throughput of the whole loop, see `TrainingResult`.
        steps: number of steps of the whole training, with those before an interruption.
        interruptions: how often the run was interrupted and started again.
    """

    sharder: str | None = _key(known_text)
    world_size: int | None = _key(known_count)
    batch_size: int | None = _key(known_count)
    device: str | None = _key(known_text)
    embedding_cost_ms: float | None = _key(known_number, objective=True)
    critical_path_ms: float | None = _key(known_number, objective=True)
    stages_ms: Mapping[str, float] | None = _key(_known_numbers)
    input_dist_ms: float | None = _key(known_number)
    per_rank: tuple[StageCost, ...] | None = _key(_known_ranks)
    imbalance: float | None = _key(known_number, objective=True)
    spread: Mapping[str, float] | None = _key(_known_numbers)
    launch_ms: Mapping[str, float] | None = _key(_known_numbers)
    measured_iterations: int | None = _key(known_count)
    predicted_ms: float | None = _key(known_number)
    predicted_critical_path_ms: float | None = _key(known_number)
    predicted_stages_ms: Mapping[str, float] | None = _key(_known_numbers)
    predicted_input_dist_ms: float | None = _key(known_number)
    prices: str | None = _key(known_text)
    expected_error: float | None = _key(known_number)
    predicted_step_ms: float | None = _key(known_number)
    predicted_samples_per_s: float | None = _key(known_number)
    predicted_step_error: float | None = _key(known_number)
    predicted_parts_ms: Mapping[str, float] | None = _key(_known_numbers)
    lower_bound_ms: float | None = _key(known_number)
    gap: float | None = _key(known_number)
    plan_solve_s: float | None = _key(known_number)
    samples_per_s: float | None = _key(known_number, objective=True)
    samples_per_s_p10: float | None = _key(known_number, objective=True)
    samples_per_s_overall: float | None = _key(known_number, objective=True)
    step_ms: float | None = _key(known_number, objective=True)
    loss: float | None = _key(known_number, objective=True)
    auroc: float | None = _key(known_number, objective=True)
    normalized_entropy: float | None = _key(known_number, objective=True)
    peak_gib: float | None = _key(known_number, objective=True)
    estimated_peak_gib: float | None = _key(known_number)
    steps: int | None = _key(known_count)
    interruptions: int | None = _key(known_count)
    versions: Mapping[str, str] | None = _key(_known_texts)
    commit: str | None = _key(known_text)
    seed: int | None = _key(known_count)

    @property
    def platform(self) -> Platform:
        return Platform(
            world_size=self.world_size,
            device=self.device,
            versions=tuple(sorted((self.versions or {}).items())),
        )

    @property
    def cost(self) -> PlanCost | None:
        """Measured cost of all ranks."""
        return None if self.per_rank is None else PlanCost(self.per_rank)

    @property
    def metrics(self) -> dict[str, float | None]:
        """Figures by name, with one for every stage.

        `<stage>_ms` is the max over ranks, so that the stages sum to the critical path; those of
        the slowest rank sum to the embedding cost.
        """
        figures: dict[str, float | None] = {}
        for key in dataclasses.fields(self):
            value = getattr(self, key.name)
            if key.metadata["read"] is known_number:
                figures[key.name] = value
            elif key.name.endswith("stages_ms"):
                prefix = key.name.removesuffix("stages_ms")
                figures |= {f"{prefix}{stage}_ms": (value or {}).get(stage) for stage in STAGES}
            elif key.name == "per_rank":
                slowest = max(value, key=lambda rank: rank.total_ms) if value else None
                figures |= {
                    f"slowest_rank_{stage}_ms": slowest and slowest.stage_ms(stage)
                    for stage in STAGES
                }
        return figures

    @property
    def has_metrics(self) -> bool:
        return any(value is not None for value in self.metrics.values())


METRICS = tuple(RunResult().metrics)
"""Names of the figures of a run."""

OBJECTIVES = tuple(key.name for key in dataclasses.fields(RunResult) if key.metadata["objective"])
"""Keys of result.json that a sweep can optimize."""


def run_result(
    plan: ShardingPlan,
    report: PlanReport,
    measured: MeasuredCost,
    prediction: StepPrediction | None,
    training: TrainingResult,
    *,
    device: str,
    batch_size: int,
    seed: int,
    interruptions: int = 0,
    estimated_peak_gib: float | None = None,
) -> RunResult:
    """Gather the results of a run."""
    cost = measured.cost
    predicted: dict[str, Any] = {}
    if report.cost is not None:
        predicted = {
            "predicted_ms": report.cost.cost_ms,
            "predicted_critical_path_ms": report.cost.critical_path_ms,
            "predicted_stages_ms": _stages_ms(report.cost),
            "predicted_input_dist_ms": report.cost.input_dist_max_ms,
        }
    if prediction is not None:
        predicted |= {
            "predicted_step_ms": prediction.step_ms,
            "predicted_samples_per_s": prediction.samples_per_s,
            "predicted_step_error": prediction.error,
            "predicted_parts_ms": prediction.breakdown.mean_parts_ms,
        }
    if report.standing is not None:
        predicted |= {
            "prices": report.standing.short_text,
            "expected_error": report.standing.error,
        }
    return RunResult(
        sharder=report.sharder,
        world_size=plan.world_size,
        batch_size=batch_size,
        device=device,
        embedding_cost_ms=cost.cost_ms,
        critical_path_ms=cost.critical_path_ms,
        stages_ms=_stages_ms(cost),
        input_dist_ms=cost.input_dist_max_ms,
        per_rank=cost.per_rank,
        imbalance=cost.imbalance,
        spread=measured.spread,
        launch_ms=measured.launch_ms or None,
        measured_iterations=measured.iterations,
        **predicted,
        lower_bound_ms=report.lower_bound_ms,
        gap=report.gap,
        plan_solve_s=report.solve_s,
        samples_per_s=known_number(training.samples_per_s),
        samples_per_s_p10=known_number(training.samples_per_s_p10),
        samples_per_s_overall=known_number(training.samples_per_s_overall),
        step_ms=known_number(training.step_ms),
        loss=known_number(training.loss),
        auroc=training.evaluation.auroc,
        normalized_entropy=training.evaluation.normalized_entropy,
        peak_gib=training.peak_gib,
        estimated_peak_gib=estimated_peak_gib,
        steps=training.num_steps,
        interruptions=interruptions,
        versions=versions(),
        commit=commit(),
        seed=seed,
    )


def write_result(folder: Path, result: RunResult) -> None:
    """Write result.json, with null for values that are not known or not finite."""
    write_json(folder / FILE_NAME, _with_null(dataclasses.asdict(result)))


def _with_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_null(of_key) for key, of_key in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(entry) for entry in value]
    return known_number(value) if isinstance(value, float) else value


def read_result(folder: Path) -> RunResult | None:
    """Return the result of the run in a folder; None if the folder has none.

    Raises:
        DataError: the file cannot be read, or is not a JSON object.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        fields = read_json_object(path, noun="result")
    except ConfigError as error:
        raise DataError(str(error)) from error
    keys = dataclasses.fields(RunResult)
    return RunResult(**{key.name: key.metadata["read"](fields.get(key.name)) for key in keys})


def setting_text(setting: Setting) -> str:
    """Write overrides as on the command line."""
    return " ".join(f"{key}={value}" for key, value in setting)


def _stages_ms(cost: PlanCost) -> dict[str, float]:
    return {stage: cost.stage_max_ms(stage) for stage in STAGES}
