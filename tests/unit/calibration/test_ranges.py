"""A model extrapolates only beyond what was measured for it."""

import dataclasses

import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.adapt import adapt
from dlrm_sharded.calibration.ranges import with_ranges_of
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from tests.unit.calibration.cases import sample

COLUMNS = "columns of a shard"


@pytest.fixture(scope="module")
def packaged() -> LearnedCostModel:
    return shipped_prior(RunContext())


def with_columns(num_cols: int, kind: str = "computation") -> Sample:
    """Return a plan with a shard of so many columns."""
    measured = sample(kind=kind)
    first, *others = measured.shards
    shards = (dataclasses.replace(first, num_cols=num_cols), *others)
    return dataclasses.replace(measured, shards=shards)


def test_measured_plans_extend_the_range(packaged: LearnedCostModel) -> None:
    low, high = packaged.ranges[COLUMNS]
    assert with_ranges_of(packaged, [sample()]).ranges[COLUMNS] == (low, high)
    ranges = with_ranges_of(packaged, [sample(), with_columns(700)]).ranges
    assert ranges[COLUMNS] == (low, 700)
    assert ranges["ranks"] == packaged.ranges["ranks"]


def test_plans_of_exchanges_say_nothing_of_lookups(packaged: LearnedCostModel) -> None:
    assert with_ranges_of(packaged, [with_columns(700, "communication")]) is packaged


def test_prices_that_runs_correct_do_not_extrapolate_to_them(packaged: LearnedCostModel) -> None:
    runs = [with_columns(700), with_columns(500)]
    assert adapt(packaged, runs).model.ranges[COLUMNS][1] == 700
    assert adapt(packaged, [sample()], start=runs).model.ranges[COLUMNS][1] == 700
