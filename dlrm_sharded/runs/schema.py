"""What a run's result.json says, as far as it says it: older files lack keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.errors import ConfigError, DataError
from dlrm_sharded.json_files import read_json_object
from dlrm_sharded.plan_cost import STAGES, PlanCost

METRICS = (
    "embedding_cost_ms",
    "critical_path_ms",
    *(f"{stage}_ms" for stage in STAGES),
    *(f"slowest_rank_{stage}_ms" for stage in STAGES),
    "input_dist_ms",
    "imbalance",
    "predicted_ms",
    "predicted_critical_path_ms",
    *(f"predicted_{stage}_ms" for stage in STAGES),
    "predicted_input_dist_ms",
    "lower_bound_ms",
    "gap",
    "plan_solve_s",
    "samples_per_s",
    "samples_per_s_p10",
    "step_ms",
    "loss",
    "auroc",
    "normalized_entropy",
    "peak_gib",
)
"""Figures of a run. `<stage>_ms` is the max over ranks, so that the stages sum to the critical
path; those of the slowest rank sum to the embedding cost."""

Setting = tuple[tuple[str, str], ...]
"""Pairs of (key, value), in order of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What figures depend on beside the config; they are compared within one platform only."""

    world_size: int | None = None
    device: str | None = None
    versions: Setting = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A result.json.

    Args:
        metrics: those of METRICS that are known, and finite.
        cost: of all ranks; None where that of one is not known.
    """

    sharder: str | None
    seed: int | None
    batch_size: int | None
    commit: str | None
    platform: Platform
    metrics: Mapping[str, float]
    cost: PlanCost | None


def read_result(folder: Path) -> Result | None:
    """The result of the run in a folder; None where there is none.

    Raises:
        DataError: the file cannot be read, or is not a JSON object.
    """
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        fields = read_json_object(path, what="result")
    except ConfigError as error:
        raise DataError(str(error)) from error
    cost = _cost(fields.get("per_rank"))
    return Result(
        sharder=known_text(fields.get("sharder")),
        seed=_count(fields.get("seed")),
        batch_size=_count(fields.get("batch_size")),
        commit=known_text(fields.get("commit")),
        platform=Platform(
            world_size=_count(fields.get("world_size")),
            device=known_text(fields.get("device")),
            versions=_texts(fields.get("versions")),
        ),
        metrics=_metrics(fields, cost),
        cost=cost,
    )


def written(setting: Setting) -> str:
    """Overrides as on the command line."""
    return " ".join(f"{key}={value}" for key, value in setting)


def known_text(value: object) -> str | None:
    """A string that says something; None for anything else."""
    return value if isinstance(value, str) and value else None


def known_number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if abs(value) < 2**63 else None


def _texts(value: object) -> Setting:
    if not isinstance(value, dict):
        return ()
    return tuple(sorted((str(key), str(text)) for key, text in value.items()))


def _metrics(fields: Mapping[str, Any], cost: PlanCost | None) -> dict[str, float]:
    found = dict(fields)
    for prefix in ("", "predicted_"):
        if isinstance(stages := fields.get(f"{prefix}stages_ms"), dict):
            found |= {f"{prefix}{stage}_ms": stages.get(stage) for stage in STAGES}
    if cost is not None:
        slowest = max(cost.per_rank, key=lambda rank: rank.total_ms)
        found |= {f"slowest_rank_{stage}_ms": slowest.stage_ms(stage) for stage in STAGES}
    numbers = {name: known_number(found.get(name)) for name in METRICS}
    return {name: number for name, number in numbers.items() if number is not None}


def _cost(ranks: object) -> PlanCost | None:
    if not isinstance(ranks, list) or not ranks:
        return None
    stages_ms: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for rank in ranks:
        fields = rank if isinstance(rank, dict) else {}
        for stage, times_ms in stages_ms.items():
            time_ms = known_number(fields.get(f"{stage}_ms"))
            if time_ms is None:
                return None
            times_ms.append(time_ms)
    return PlanCost.from_stages(stages_ms, input_dist_ms=None)
