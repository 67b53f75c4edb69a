"""Errors of a cost model, by hand."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from dlrm_sharded.calibration.prediction_errors import (
    Predictor,
    TimePairs,
    averaged,
    compare,
)
from dlrm_sharded.calibration.samples import MeasuredShard, Sample
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from tests.unit.calibration.cases import sample
from tests.unit.made_up import USED_ONCE

Times = tuple[float, float, float, float]
Pairs = dict[str, tuple[list[float], list[float]]]


def cost_of(times: Sequence[Times], *, ids_ms: float) -> PlanCost:
    return PlanCost(tuple(StageCost(*rank) for rank in times), (ids_ms,) * len(times))


def measured(kind: str, *times: Times, shards: tuple[int, ...], by_rows: int = 0) -> Sample:
    """With so many shards on each rank, and so many more of row-wise tables on all of them."""
    on_ranks = tuple(
        MeasuredShard(rank, 100, 16, 1.0, USED_ONCE, row_wise=i >= count)
        for rank, count in enumerate(shards)
        for i in range(count + by_rows)
    )
    made = sample(kind=kind, times_ms=tuple((2.0, *rank) for rank in times))
    return dataclasses.replace(made, batch_size=64, shards=on_ranks)


def always(*times: Times) -> Predictor:
    """A model that predicts these times, whatever the plan, and 3 ms of input redistribution."""

    return lambda workload: cost_of(times[: workload.world_size], ids_ms=3.0)


def pairs_of(found: dict[str, TimePairs]) -> Pairs:
    return {name: (of.predicted, of.measured) for name, of in found.items()}


def test_compares_ranks_and_slowest_ranks() -> None:
    samples = [measured("computation", (1, 2, 3, 4), (2, 1, 1, 6), shards=(1, 3))]
    assert pairs_of(compare(always((2, 2, 3, 4), (1, 4, 1, 6)), samples)) == {
        "computation, 1 shard": ([6], [5]),
        "computation, 2 to 8 shards": ([7], [8]),
        "computation, groups": ([7], [8]),
        "forward computation": ([2, 1], [1, 2]),
        "backward computation": ([4, 6], [4, 6]),
        "forward communication, 2 ranks": ([4], [2]),
        "backward communication, 2 ranks": ([3], [3]),
        "input distribution, 2 ranks": ([3], [2]),
        "plan, embedding cost": ([12], [10]),
        "plan, critical path": ([15], [13]),
    }


def test_ranks_whose_accesses_are_mostly_not_zipf() -> None:
    """By ids: the second rank has most of its ids from the one shard with uniform accesses."""
    plain = measured("computation", (1, 2, 3, 4), (2, 1, 1, 6), shards=(1, 3))
    zipf, *others = plain.shards
    others[0] = dataclasses.replace(others[0], accesses="uniform", pooling_factor=2.5)
    mixed = dataclasses.replace(plain, shards=(zipf, *others))
    predict = always((2, 2, 3, 4), (1, 4, 1, 6))
    assert pairs_of(compare(predict, [mixed]))["computation, not Zipf"] == ([7], [8])
    assert "computation, not Zipf" not in compare(predict, [plain])


def attempt(number: int, *times: Times, ids_ms: float = 2.0, of: int = 0) -> Sample:
    made = measured("computation", *times, shards=(1,) * len(times))
    cost = cost_of(times, ids_ms=ids_ms)
    return dataclasses.replace(made, number=of, attempt=number, cost=cost)


def test_averages_are_medians_time_by_time() -> None:
    samples = [
        attempt(0, (1, 10, 3, 4), (5, 6, 7, 8), ids_ms=2.0),
        attempt(0, (1, 1, 1, 1), (1, 1, 1, 1), of=1),
        attempt(1, (2, 2, 30, 4), (5, 6, 7, 80), ids_ms=4.0),
        attempt(2, (3, 3, 3, 4), (5, 6, 7, 9), ids_ms=30.0),
    ]
    first, other = averaged(samples)
    assert other == samples[1]
    assert first.cost == cost_of([(2, 3, 3, 4), (5, 6, 7, 9)], ids_ms=4.0)
    assert (first.attempt, first.shards) == (0, samples[0].shards)


@pytest.mark.parametrize(
    ("count", "name"),
    [(1, "1 shard"), (2, "2 to 8 shards"), (9, "9 to 40 shards"), (41, "more than 40 shards")],
)
def test_counts_shards(count: int, name: str) -> None:
    samples = [measured("computation", (1, 0, 0, 2), shards=(count,))]
    found = compare(always((1, 0, 0, 1)), samples)
    assert f"computation, {name}" in found
    assert ("computation, groups" in found) == (count > 1)
    assert not [other for other in found if "communication" in other or "input" in other]


def test_summary_by_hand() -> None:
    pairs = TimePairs(predicted=[1.1, 1.0, 4.0, 8.0], measured=[1.0, 2.0, 4.0, 10.0])
    np.testing.assert_allclose(pairs.relative_errors, [0.1, -0.5, 0.0, -0.2])
    summary = {"num": 4, "mape": 20.0, "median": 15.0, "p90": 41.0, "spearman": 0.8}
    assert pairs.summary() == summary
