"""What is said of a plan: costs, distance from the bound, and the form of plan.json."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan import Shard, ShardingPlan, read_plan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport, plan_json

PLAN = ShardingPlan(2, (Shard("t", 0, (0, 100), (0, 4)), Shard("t", 1, (0, 100), (4, 16))))
COST = PlanCost((StageCost(1.0, 2.0, 3.0, 4.0), StageCost(4.0, 1.0, 1.0, 1.0)))


def test_costs() -> None:
    assert COST.cost_ms == 10
    assert COST.critical_path_ms == 4 + 2 + 3 + 4
    assert COST.imbalance == pytest.approx(10 / 8.5)
    assert COST.stage_max_ms("fwd_compute") == 4
    assert COST.stage_mean_ms("fwd_compute") == 2.5
    assert COST.input_dist_max_ms is None
    assert PlanCost(COST.per_rank, (0.5, 0.75)).input_dist_max_ms == 0.75
    assert PlanCost.from_json(COST.to_json()) == COST


@pytest.mark.parametrize(
    ("cost", "bound_ms", "gap"),
    [
        (COST, 8.0, 0.25),
        (COST, 10.0, 0.0),
        (COST, None, None),
        (COST, 0.0, None),
        (None, 8.0, None),
        (None, None, None),
        (COST, math.inf, -1.0),
    ],
)
def test_gap(cost: PlanCost | None, bound_ms: float | None, gap: float | None) -> None:
    """A bound of 0 says nothing, and one of inf is of a task that no plan fits."""
    assert PlanReport("dim", 0.1, cost=cost, lower_bound_ms=bound_ms).gap == gap


def test_an_expected_excess_is_a_part_of_the_cost_and_not_of_the_gap() -> None:
    cost = dataclasses.replace(COST, excess_ms=0.5)
    assert (cost.cost_ms, cost.critical_path_ms) == (10.5, 13.5)
    assert PlanReport("dim", 0.1, cost=cost, lower_bound_ms=8.0).gap == 0.25
    assert PlanCost.from_json(cost.to_json()) == cost
    before = {"per_rank": cost.to_json()["per_rank"]}  # as earlier versions wrote it
    assert PlanCost.from_json(before) == COST


def test_plan_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = PlanReport("dim", solve_s=0.1, cost=COST, lower_bound_ms=8.0)
    write_json(tmp_path / "plan.json", plan_json(PLAN, report))
    assert (read_plan(tmp_path / "plan.json"), caplog.messages) == (PLAN, [])
    fields = json.loads((tmp_path / "plan.json").read_text())
    predicted = fields.pop("predicted")
    assert (predicted["max_ms"], predicted["critical_path_ms"]) == (10.0, 13.0)
    assert predicted["per_rank"][1] == COST.per_rank[1].to_json()
    assert COST.per_rank[1].to_json() == dict.fromkeys(COST.per_rank[1].to_json(), 1.0) | {
        "fwd_compute_ms": 4.0
    }
    assert fields == {
        "sharder": "dim",
        "costs": None,
        "world_size": 2,
        "shards": [
            {"table": "t", "rank": 0, "rows": [0, 100], "cols": [0, 4]},
            {"table": "t", "rank": 1, "rows": [0, 100], "cols": [4, 16]},
        ],
        "solve_s": 0.1,
        "lower_bound_ms": 8.0,
        "gap": 0.25,
        **dict.fromkeys(("caveat", "prices", "profiles", "made_from")),
    }


@pytest.mark.parametrize("said", [{}, {"solve_s": "abc", "gap": [], "predicted": {"max_ms": 1}}])
def test_a_plan_is_read_without_what_is_said_of_it(tmp_path: Path, said: dict[str, object]) -> None:
    report = PlanReport("dim", 0.1, cost=COST, lower_bound_ms=8.0)
    write_json(tmp_path / "plan.json", plan_json(PLAN, report) | said)
    assert read_plan(tmp_path / "plan.json") == PLAN
