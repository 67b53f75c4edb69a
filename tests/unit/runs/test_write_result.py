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
from dlrm_sharded.runs.write_result import prediction, result_json, summary
from dlrm_sharded.tables import Table
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.trainer import TrainingResult

MEASURED = MeasuredCost(
    cost=PlanCost((StageCost(1.0, 2.0, 3.0, 4.0), StageCost(4.0, 3.0, 2.0, 0.0))),
    input_dist_ms=(0.5, 0.75),
    spread={},
    iterations=20,
)
PREDICTED = PlanCost((StageCost(1.0, 2.5, 1.0, 1.0), StageCost(1.5, 1.0, 2.0, 1.75)))
UNPREDICTED = ShardingPlan("test", 2, (Shard.whole(Table("a", 10, 8, 1.0), 0),))
PLAN = dataclasses.replace(UNPREDICTED, predicted=PREDICTED, lower_bound_ms=5.0, gap=0.25)
RESULT = TrainingResult(12, 10.0, 6400.0, 6000.0, 0.5, Evaluation(None, None, 0), 0.25)


def fields(plan: ShardingPlan, input_dist_ms: tuple[float, ...] | None) -> dict[str, Any]:
    """Of result.json that are about the prediction, as they are read back."""
    about = ("predicted", "lower_bound_ms", "gap")
    written = result_json(
        plan,
        MEASURED,
        RESULT,
        predicted_input_dist_ms=input_dist_ms,
        device=torch.device("cpu"),
        batch_size=64,
        seed=0,
    )
    read: dict[str, Any] = json.loads(json.dumps(written))
    return {key: value for key, value in read.items() if key.startswith(about)}


def test_what_was_predicted_is_kept() -> None:
    assert fields(PLAN, (0.5, 0.625)) == {
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


@pytest.mark.parametrize("plan", [PLAN, UNPREDICTED], ids=["by_its_sharder", "not_at_all"])
def test_what_is_not_predicted_is_null(plan: ShardingPlan) -> None:
    """A sharder may predict the cost and not the redistribution of the ids."""
    found = fields(plan, None)
    assert found.keys() == fields(PLAN, (0.5, 0.625)).keys()
    unknown = {key for key, value in found.items() if value is None}
    assert unknown == ({"predicted_input_dist_ms"} if plan.predicted else found.keys())


def test_the_prediction_beside_what_was_measured() -> None:
    assert prediction(PREDICTED, MEASURED.cost) == (
        "predicted 6.25 ms (-38 %), critical path 7.75 ms (-45 %): fwd_compute 1.50 (-62 %), "
        "fwd_comm 2.50 (-17 %), bwd_comm 2.00 (-33 %), bwd_compute 1.75 (-56 %)"
    )


def test_the_summary_has_the_prediction_where_there_is_one() -> None:
    def cost_line(plan: ShardingPlan) -> str:
        lines = summary(plan, MEASURED, RESULT, Path("runs/x")).splitlines()
        (line,) = (line.strip() for line in lines if "embedding cost" in line)
        return line

    assert cost_line(PLAN) == "embedding cost   10.00 ms (predicted 6.25; imbalance 1.05)"
    assert cost_line(UNPREDICTED) == "embedding cost   10.00 ms (imbalance 1.05)"
