"""A run writes its main figures to the terminal."""

from pathlib import Path

import pytest

from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.runs.terminal import closing_text, prediction_text
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.result import TrainingResult
from tests.unit.runs.test_result import MEASURED as MEASURED_COST
from tests.unit.runs.test_result import PREDICTED as PREDICTED_COST
from tests.unit.runs.test_result import SURROUNDINGS

MEASURED = MEASURED_COST.cost
PREDICTED = PlanCost(PREDICTED_COST.per_rank)
UNVALIDATED = Evaluation(None, None, 0)


def closing(
    report: PlanReport,
    evaluation: Evaluation,
    samples_per_s: float = 6400.0,
    *,
    cost: PlanCost = MEASURED,
    on_cuda: bool = False,
    ids: dict[str, int] | None = None,
    **places: str,
) -> str:
    training = TrainingResult(
        *(12, 10.0, samples_per_s, 6000.0, 5000.0, 0.5, evaluation, 0.25, SURROUNDINGS),
        ids_out_of_range=ids or {},
    )
    return closing_text(report, cost, training, Path("runs/x"), on_cuda=on_cuda, **places)


def test_ids_that_tables_lack():
    lines = closing(PlanReport("dim", 0.5), Evaluation(None, None, 0), ids={"b": 1200, "a": 7})
    for said in ("7 of a", "1,200 of b"):
        assert f"  ids beyond rows  {said}: row 0 was looked up for them\n" in lines


def test_the_prediction_beside_what_was_measured():
    text, is_surprise = prediction_text(PlanReport("dim", 0.5, cost=PREDICTED), MEASURED)
    assert not is_surprise
    assert "6.25 ms (-38 %)" in text
    assert "critical path 7.75 ms (-45 %)" in text
    differences = ["1.50 ms (-62 %)", "2.50 ms (-17 %)", "2.00 ms (-33 %)", "1.75 ms (-56 %)"]
    for stage, difference in zip(STAGES, differences, strict=True):
        assert f"{stage} {difference}" in text


@pytest.mark.parametrize(("error", "is_surprise"), [(0.6, True), (0.9, False)])
def test_an_error_beyond_what_was_expected(error: float, is_surprise: bool) -> None:
    """The critical path is 14 ms, 1.81 times what was predicted."""
    report = PlanReport("dim", 0.5, cost=PREDICTED, standing=Standing("prior", "cpu", error=error))
    text, said = prediction_text(report, MEASURED)
    assert said == is_surprise
    assert ("beyond the expected within about 60 %; `dlrm-calibrate`" in text) == is_surprise


@pytest.mark.parametrize(
    ("places", "lines"),
    [
        ({}, ["results in       runs/x"]),
        (
            {"host": "node0", "checkpoints_in": "s3://b/run/checkpoints"},
            ["results in       runs/x on host node0", "checkpoints in   s3://b/run/checkpoints"],
        ),
    ],
    ids=["one disk", "elsewhere"],
)
def test_what_lies_where(places, lines):
    text = closing(PlanReport("dim", 0.5), UNVALIDATED, **places)
    assert [line.strip() for line in text.splitlines() if " in   " in line] == lines


@pytest.mark.parametrize("cost", [PREDICTED, None], ids=["predicted", "unpredicted"])
def test_closing(cost):
    text = closing(PlanReport("search", 0.5, cost=cost), UNVALIDATED)
    shown = ["10.00 ms", "14.00 ms", "0.75 ms", "6,400", "5,000"]
    shown += ["search", "2 ranks", "runs/x"]
    assert [words for words in shown if words not in text] == []
    assert ("predicted 6.25" in text) == (cost is not None)
    assert "no validation" in text


def test_closing_says_what_a_prediction_is_worth():
    report = PlanReport("search", 0.5, cost=PREDICTED, caveat="those are times of a CPU")
    assert closing(report, UNVALIDATED).splitlines()[-1] == "  caveat: those are times of a CPU"
    assert "caveat" not in closing(PlanReport("dim", 0.5, cost=PREDICTED), UNVALIDATED)


def test_closing_with_validation():
    text = closing(PlanReport("dim", 0.5), Evaluation(0.71234, 0.9, 1024))
    assert "0.7123" in text
    assert "1,024 samples" in text
