"""How far predicted costs are from measured ones, separately for each predicted quantity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dlrm_sharded.calibration.samples import COMMUNICATION, Sample
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.plan_cost import DIRECTIONS, PlanCost

PLAN = "plan, critical path"
"""Name of the quantity whose error is stated."""

Errors = dict[str, dict[str, float]]


def prediction_errors(pairs: Iterable[tuple[PlanCost, Sample]]) -> Errors:
    """Compare predictions with measured plans.

    Computation is compared for every rank that has a shard, exchanges and whole plans on their
    slowest rank. Times that no clock shows have no relative error.

    Returns:
        Number of times, and errors in percent of the measured time, by the predicted quantity.
    """
    errors: dict[str, list[float]] = {}
    for cost, sample in pairs:
        for name, predicted_ms, measured_ms in _times(cost, sample):
            if measured_ms > 0:
                errors.setdefault(name, []).append(100 * abs(predicted_ms / measured_ms - 1))
    return {
        name: {
            "num": len(found),
            "mape": round(float(np.mean(found)), 2),
            "median": round(float(np.median(found)), 2),
            "p90": round(float(np.percentile(found, 90)), 2),
        }
        for name, found in sorted(errors.items())
    }


def _times(cost: PlanCost, sample: Sample) -> Iterator[tuple[str, float, float]]:
    """Yield a quantity, its predicted and its measured time."""
    measured = sample.cost
    if sample.kind != COMMUNICATION:
        yield PLAN, cost.critical_path_ms, measured.critical_path_ms
        yield "plan, embedding cost", cost.cost_ms, measured.cost_ms
        for rank in sorted({shard.rank for shard in sample.shards}):
            ours, theirs = cost.per_rank[rank], measured.per_rank[rank]
            for direction, stage in LOOKUP_STAGES.items():
                yield f"{direction} computation", ours.stage_ms(stage), theirs.stage_ms(stage)
    if sample.world_size > 1:
        ranks = f"{sample.world_size} ranks"
        for stage, direction in zip(STEP_EXCHANGES, DIRECTIONS, strict=True):
            times = cost.stage_max_ms(stage), measured.stage_max_ms(stage)
            yield f"{direction} communication, {ranks}", *times
        if cost.input_dist_max_ms is not None:
            ids_ms = cost.input_dist_max_ms, measured.input_dist_max_ms or 0.0
            yield f"input distribution, {ranks}", *ids_ms


def errors_table(errors: Errors) -> str:
    """Return a Markdown table with a row for each quantity."""
    columns = {
        "num": Column("plans or ranks", ".0f"),
        "mape": Column("MAPE, %", ".1f"),
        "median": Column("median, %", ".1f"),
        "p90": Column("p90, %", ".1f"),
    }
    rows = [[name, *(row[key] for key in columns)] for name, row in errors.items()]
    return TextTable(["predicted", *columns.values()], rows).markdown()
