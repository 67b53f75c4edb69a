"""The worth of measured profiles is the range of a plan's cost, and what a search gains."""

import dataclasses

import pytest

from dlrm_sharded import Planner, ShardingTask
from dlrm_sharded.accesses.profiles import SKEWS, with_expected_profile
from dlrm_sharded.explain.profile_value import value_profiles
from dlrm_sharded.explain.text import profile_value_text
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.unit.search.synthetic import model_of
from tests.unit.synthetic import in_turns, tables_of, task_of

MODEL = model_of("shipped")
TABLES = tables_of(*((10 ** (3 + i % 4), 32, 3.0 * (1 + i)) for i in range(10)))
TASK = task_of(TABLES, 2, 2**34, 8192)
PLAN = in_turns(TASK)


def with_skew(exponent: float) -> ShardingTask:
    tables = with_expected_profile(TABLES, batch_size=8192, exponent=exponent)
    return dataclasses.replace(TASK, tables=tables)


def test_the_range_has_the_cost_at_every_skew() -> None:
    value = value_profiles(PLAN, TASK, MODEL.cost_task(TASK))

    costs = [MODEL.predict(PLAN, with_skew(exponent)).cost_ms for exponent in SKEWS]
    assert value.num_assumed == 10
    assert value.least_ms == pytest.approx(min(costs), rel=2e-3)
    assert value.most_ms == pytest.approx(max(costs), rel=2e-3)
    assert value.least_ms < value.most_ms
    assert value.gain is None or 0 <= value.gain < 0.5


def test_reports_have_it_where_profiles_are_assumed() -> None:
    planner = Planner(GreedySharder("size"), MODEL, value_profiles=value_profiles)
    plan, report = planner.plan(TASK)
    written = plan_json(plan, report)["profiles"]
    assert written["assumed"] == 10
    assert written["least_ms"] <= report.cost.cost_ms <= written["most_ms"]
    assert "depending on the skew of unmeasured accesses" in profile_value_text(
        report.profile_value
    )

    plan, report = planner.plan(with_skew(0.9))
    assert report.profile_value is None
    assert plan_json(plan, report)["profiles"] is None
