"""Errors of a cost model, by hand."""

from dlrm_sharded.calibration.prediction_errors import errors_table, prediction_errors
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from tests.unit.calibration.cases import sample


def test_compares_ranks_and_slowest_ranks() -> None:
    measured = sample(times_ms=((2, 1, 2, 3, 4), (2, 2, 1, 1, 6)))
    predicted = PlanCost((StageCost(2, 2, 3, 4), StageCost(1, 4, 1, 6)), input_dist_ms=(3.0, 3.0))
    errors = prediction_errors([(predicted, measured)])
    assert {name: (row["num"], row["mape"]) for name, row in errors.items()} == {
        "plan, critical path": (1, 15.38),  # 15 of 13
        "plan, embedding cost": (1, 20.0),  # 12 of 10
        "forward computation": (2, 75.0),  # 2 of 1, 1 of 2
        "backward computation": (2, 0.0),
        "forward communication, 2 ranks": (1, 100.0),  # 4 of 2
        "backward communication, 2 ranks": (1, 0.0),
        "input distribution, 2 ranks": (1, 50.0),
    }
    assert "| forward computation | 2 | 75.0 | 75.0 |" in errors_table(errors)
    tiny = sample(kind="communication", times_ms=((2, 1, 2, 3, 4), (2, 2, 1, 1, 6)))
    assert not [name for name in prediction_errors([(predicted, tiny)]) if "comp" in name]
