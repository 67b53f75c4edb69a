"""Compares predicted costs with measured ones, separately for each predicted quantity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import spearmanr

from dlrm_sharded.accesses.patterns import ZipfAccesses
from dlrm_sharded.calibration.samples import CRITICAL_PATH, Sample, workload_of_sample
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.cost.workload import Workload
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.plan_cost import DIRECTIONS, STAGES, PlanCost

SHARD_COUNTS = {"1 shard": (1, 1), "2 to 8 shards": (2, 8), "9 to 40 shards": (9, 40)}
"""Classes of ranks by the lowest and highest number of their shards."""

MORE_SHARDS = "more than 40 shards"
"""Class of all other ranks."""

Predictor = Callable[[Workload], PlanCost]
"""Predicts the cost of a measured plan."""


@dataclass(slots=True)
class TimePairs:
    """Predicted times and the measured times that belong to them, in ms."""

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    def add(self, predicted: float, measured: float) -> None:
        """Append one pair."""
        self.predicted.append(predicted)
        self.measured.append(measured)

    @property
    def relative_errors(self) -> np.ndarray:
        """Return [N], predicted / measured - 1."""
        return np.array(self.predicted) / np.array(self.measured) - 1.0

    def summary(self) -> dict[str, float]:
        """Return errors in percent of the measured time; there is no NaN among them."""
        errors = 100 * np.abs(self.relative_errors)
        varied = len(set(self.measured)) > 1 and len(set(self.predicted)) > 1
        return {
            "num": len(errors),
            "mape": round(float(errors.mean()), 2),
            "median": round(float(np.median(errors)), 2),
            "p90": round(float(np.percentile(errors, 90)), 2),
            "spearman": round(
                float(spearmanr(self.predicted, self.measured)[0]) if varied else 1.0, 4
            ),
        }


def averaged(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample for each plan, with the median of each time over its measurements."""
    attempts: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        attempts.setdefault((sample.kind, sample.number), []).append(sample)
    return [
        dataclasses.replace(repeats[0], cost=_median_cost([sample.cost for sample in repeats]))
        for repeats in attempts.values()
    ]


def _median_cost(costs: Sequence[PlanCost]) -> PlanCost:
    """Return the median of each time over several measurements of a plan."""
    stages_ms = {
        stage: np.median(
            [[rank.stage_ms(stage) for rank in cost.per_rank] for cost in costs], axis=0
        ).tolist()
        for stage in STAGES
    }
    input_dist_ms = np.median([cost.input_dist_ms for cost in costs], axis=0).tolist()
    return PlanCost.from_stages(stages_ms, input_dist_ms=input_dist_ms)


def compare(predict: Predictor, samples: Iterable[Sample]) -> dict[str, TimePairs]:
    """Compare predictions with measured plans.

    Computation, forward and backward together, is compared for every rank that has a shard;
    exchanges and whole plans are compared on their slowest rank.

    Returns:
        Pairs of times by name of the predicted quantity.
    """
    pairs_by_name: dict[str, TimePairs] = {}
    for sample in samples:
        _compare_plan(pairs_by_name, sample, predict(workload_of_sample(sample)))
    return dict(sorted(pairs_by_name.items()))


def _compare_plan(pairs_by_name: dict[str, TimePairs], sample: Sample, cost: PlanCost) -> None:
    def add(name: str, predicted: float, measured: float) -> None:
        if measured > 0:  # a time below the clock's resolution has no relative error
            pairs_by_name.setdefault(name, TimePairs()).add(predicted, measured)

    if sample.kind == "computation":
        workload = workload_of_sample(sample)
        for rank, stages in enumerate(sample.cost.per_rank):
            on_rank = workload.rank == rank
            count = int(on_rank.sum())
            if count == 0:
                continue
            expected = cost.per_rank[rank]
            directions = (expected.computation_ms, stages.computation_ms)
            sizes = (name for name, (low, high) in SHARD_COUNTS.items() if low <= count <= high)
            add(f"computation, {next(sizes, MORE_SHARDS)}", *directions)
            if count > 1:
                add("computation, groups", *directions)
            if _mostly_not_zipf(sample, rank):
                add("computation, not Zipf", *directions)
            if (workload.group_size[on_rank] > 1).any():
                add("computation, with row-wise shards", *directions)
            for direction, stage in LOOKUP_STAGES.items():
                add(f"{direction} computation", expected.stage_ms(stage), stages.stage_ms(stage))
        add("plan, embedding cost", cost.cost_ms, sample.cost.cost_ms)
        add("plan, critical path", cost.critical_path_ms, sample.cost.critical_path_ms)
    if sample.world_size > 1:
        ranks = f"{sample.world_size} ranks"
        for stage, name in zip(STEP_EXCHANGES, DIRECTIONS, strict=True):
            predicted, measured = cost.stage_max_ms(stage), sample.cost.stage_max_ms(stage)
            add(f"{name} communication, {ranks}", predicted, measured)
        ids_ms, measured_ids_ms = cost.input_dist_max_ms, sample.cost.input_dist_max_ms
        if ids_ms is not None and measured_ids_ms is not None:
            add(f"input distribution, {ranks}", ids_ms, measured_ids_ms)


def _mostly_not_zipf(sample: Sample, rank: int) -> bool:
    """Return whether less than half of a rank's ids come from Zipf-distributed accesses."""
    ids, zipf_ids = 0.0, 0.0
    for shard in sample.shards:
        if shard.rank == rank:
            ids += shard.pooling_factor
            zipf_ids += shard.pooling_factor * (shard.accesses == ZipfAccesses.name)
    return zipf_ids < ids / 2


def repeatability_text(repeatability: Mapping[str, Mapping[str, float]]) -> str | None:
    """Say how far second measurements were from the first, which no prediction can do better than.

    Args:
        repeatability: as `samples.repeatability` returns it.
    """
    parts = [
        f"{row[CRITICAL_PATH]:.1f} % in {name} ({row['num']:.0f} plans)"
        for name, row in repeatability.items()
        if CRITICAL_PATH in row
    ]
    if not parts:
        return None
    return f"critical paths measured twice differ by {', '.join(parts)}"


def errors_table(errors: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table with a row for each summary of `TimePairs`."""
    columns = {
        "num": Column("plans or ranks", ".0f"),
        "mape": Column("MAPE, %", ".1f"),
        "median": Column("median, %", ".1f"),
        "p90": Column("p90, %", ".1f"),
        "spearman": Column("Spearman", ".4f"),
    }
    rows = [[name, *(row[key] for key in columns)] for name, row in errors.items()]
    return TextTable(["predicted", *columns.values()], rows).markdown()
