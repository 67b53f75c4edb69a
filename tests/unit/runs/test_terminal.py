"""A run writes its main figures to the terminal."""

from pathlib import Path

import pytest

from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.runs.terminal import closing_text, prediction_text
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.step_choice import StepOptions
from dlrm_sharded.training.training_result import TrainingResult
from tests.unit.runs.test_result import MACHINE_LOAD
from tests.unit.runs.test_result import MEASURED as MEASURED_COST
from tests.unit.runs.test_result import PREDICTED as PREDICTED_COST

MEASURED = MEASURED_COST.cost
PREDICTED = PlanCost(PREDICTED_COST.per_rank)
UNVALIDATED = Evaluation(None, None, 0)


def closing(
    report: PlanReport,
    evaluation: Evaluation = UNVALIDATED,
    *,
    ids: dict[str, int] | None = None,
    **places: str,
) -> list[str]:
    training = TrainingResult(
        *(
            12,
            StepOptions("base", "none", False),
            10.0,
            6400.0,
            6000.0,
            5000.0,
            0.5,
            evaluation,
            0.25,
            MACHINE_LOAD,
        ),
        ids_out_of_range=ids or {},
    )
    text = closing_text(report, MEASURED, training, Path("runs/x"), **places)
    return text.splitlines()


def test_the_prediction_beside_what_was_measured():
    text, is_surprise = prediction_text(PlanReport("dim", 0.5, cost=PREDICTED), MEASURED)
    assert not is_surprise
    assert "6.25 ms (-38 %), critical path 7.75 ms (-45 %)" in text
    differences = ["1.50 ms (-62 %)", "2.50 ms (-17 %)", "2.00 ms (-33 %)", "1.75 ms (-56 %)"]
    for stage, difference in zip(STAGES, differences, strict=True):
        assert f"{stage} {difference}" in text


@pytest.mark.parametrize(("error", "is_surprise"), [(0.6, True), (0.9, False)])
def test_an_error_beyond_what_was_expected(error: float, is_surprise: bool) -> None:
    """The critical path is 14 ms, 1.81 times what was predicted."""
    report = PlanReport(
        "dim", 0.5, cost=PREDICTED, provenance=CostProvenance("prior", "cpu", error=error)
    )
    text, said = prediction_text(report, MEASURED)
    assert said == is_surprise
    assert ("apart, beyond the expected 1.60; `dlrm-calibrate`" in text) == is_surprise


@pytest.mark.parametrize("cost", [PREDICTED, None], ids=["predicted", "unpredicted"])
def test_closing(cost):
    lines = closing(PlanReport("search", 0.5, cost=cost))
    text = "\n".join(lines)
    shown = ["10.00 ms", "14.00 ms", "0.75 ms", "6,400", "5,000", "search", "2 ranks"]
    assert [words for words in shown if words not in text] == []
    assert ("predicted 6.25" in text) == (cost is not None)
    assert "  validation       none" in text
    assert "  results in       runs/x" in lines
    assert "caveat" not in text


def test_closing_says_what_is_not_as_usual():
    report = PlanReport("search", 0.5, cost=PREDICTED, caveat="those are times of a CPU")
    elsewhere = {"host": "node0", "checkpoints_in": "s3://b/run/checkpoints"}
    lines = closing(report, Evaluation(0.71234, 0.9, 1024), ids={"a": 7}, **elsewhere)
    assert "  ids beyond rows  7 of a: row 0 was looked up for them" in lines
    assert "  results in       runs/x on host node0" in lines
    assert "  checkpoints in   s3://b/run/checkpoints" in lines
    assert lines[-1] == "  caveat: those are times of a CPU"
    assert "AUROC 0.7123, normalized entropy 0.9000, on 1,024 samples" in "\n".join(lines)
    one_class = closing(report, Evaluation(None, None, 1024))
    assert "  training loss    0.5000 in the last steps" in one_class
    assert "  validation       on 1,024 samples, which have one label" in one_class
