"""What a run says when it ends: to programs, and to people."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.calibration.measure import MeasuredCost
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.plan_cost import PlanCost, StageCost
from dlrm_sharded.plan_report import PlanReport
from dlrm_sharded.runs.write_result import prediction, result_json, summary
from dlrm_sharded.tables import Table
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.trainer import TrainingResult

MEASURED = MeasuredCost(
    cost=PlanCost((StageCost(1.0, 2.0, 3.0, 4.0), StageCost(4.0, 3.0, 2.0, 0.0)), (0.5, 0.75)),
    spread={},
    iterations=20,
)
PREDICTED = PlanCost((StageCost(1.0, 2.5, 1.0, 1.0), StageCost(1.5, 1.0, 2.0, 1.75)), (0.5, 0.625))
PLAN = ShardingPlan(2, (Shard.whole(Table("a", 10, 8, 1.0), 0),))
REPORT = PlanReport("test", solve_s=0.5, cost=PREDICTED, lower_bound_ms=5.0)
UNPREDICTED = PlanReport("test", solve_s=0.5)
WITHOUT_IDS = dataclasses.replace(REPORT, cost=PlanCost(PREDICTED.per_rank))
RESULT = TrainingResult(12, 10.0, 6400.0, 6000.0, 0.5, Evaluation(None, None, 0), 0.25)


def fields(report: PlanReport) -> dict[str, Any]:
    """Of result.json that are about the prediction, as they are read back."""
    about = ("predicted", "lower_bound_ms", "gap")
    written = result_json(
        PLAN,
        report,
        MEASURED,
        RESULT,
        device=torch.device("cpu"),
        batch_size=64,
        seed=0,
    )
    read: dict[str, Any] = json.loads(json.dumps(written))
    assert (read["sharder"], read["plan_solve_s"], read["world_size"]) == ("test", 0.5, 2)
    assert read["input_dist_ms"] == 0.75
    return {key: value for key, value in read.items() if key.startswith(about)}


def test_what_was_predicted_is_kept() -> None:
    assert fields(REPORT) == {
        "predicted_ms": 6.25,
        "predicted_critical_path_ms": 7.75,
        "predicted_stages_ms": {
            "fwd_compute": 1.5,
            "fwd_comm": 2.5,
            "bwd_comm": 2.0,
            "bwd_compute": 1.75,
        },
        "predicted_input_dist_ms": 0.625,
        "lower_bound_ms": 5.0,
        "gap": 0.25,
    }


@pytest.mark.parametrize("report", [WITHOUT_IDS, UNPREDICTED], ids=["without_ids", "not_at_all"])
def test_what_is_not_predicted_is_null(report: PlanReport) -> None:
    """A cost model may predict the cost and not the redistribution of the ids."""
    found = fields(report)
    assert found.keys() == fields(REPORT).keys()
    unknown = {key for key, value in found.items() if value is None}
    assert unknown == ({"predicted_input_dist_ms"} if report.cost else found.keys())


def test_the_prediction_beside_what_was_measured() -> None:
    assert prediction(PREDICTED, MEASURED.cost) == (
        "predicted 6.25 ms (-38 %), critical path 7.75 ms (-45 %): fwd_compute 1.50 (-62 %), "
        "fwd_comm 2.50 (-17 %), bwd_comm 2.00 (-33 %), bwd_compute 1.75 (-56 %)"
    )


def test_the_summary_has_the_prediction_where_there_is_one() -> None:
    def cost_line(report: PlanReport) -> str:
        lines = summary(report, MEASURED, RESULT, Path("runs/x")).splitlines()
        (line,) = (line.strip() for line in lines if "embedding cost" in line)
        return line

    assert cost_line(REPORT) == "embedding cost   10.00 ms (predicted 6.25; imbalance 1.05)"
    assert cost_line(UNPREDICTED) == "embedding cost   10.00 ms (imbalance 1.05)"
