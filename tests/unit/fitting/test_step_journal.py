"""Steps of earlier runs correct the next prediction, and tell how far it may be off."""

import logging
import math

import pytest

from dlrm_sharded.fitting.run_journal import Conditions, RunJournal
from dlrm_sharded.fitting.step_journal import (
    FACTORS,
    MAX_STEPS,
    MeasuredStep,
    StepConditions,
    StepJournal,
    correction_of,
)
from dlrm_sharded.step.prediction import COMPOSITION_ERROR

CONDITIONS = StepConditions(Conditions("rowwise_adagrad", 2), "serial")


def journal(tmp_path, conditions=CONDITIONS):
    return StepJournal.beside(RunJournal(tmp_path / "deep" / "abc.jsonl"), conditions)


def test_no_run_corrects_nothing(tmp_path):
    correction = correction_of(journal(tmp_path).read())
    assert (correction.factor, correction.error) == (1.0, COMPOSITION_ERROR)


def test_runs_that_agree_correct_more_the_more_they_are(tmp_path):
    noted = journal(tmp_path)
    factors, errors = [], []
    for _ in range(12):
        noted.append(MeasuredStep(100.0, 110.0))
        correction = correction_of(noted.read())
        factors.append(correction.factor)
        errors.append(correction.error)
    assert factors == sorted(factors)
    assert factors[0] == pytest.approx(1.1**0.5)
    # Half of the error without a run, beside how far one ratio is from half of itself.
    assert errors[0] == pytest.approx(math.hypot(0.5 * COMPOSITION_ERROR, 0.5 * math.log(1.1)))
    assert factors[-1] == pytest.approx(1.1, rel=0.01)
    assert errors == sorted(errors, reverse=True)


def test_runs_that_differ_leave_an_error(tmp_path):
    noted = journal(tmp_path)
    for measured_ms in (80.0, 125.0) * 10:
        noted.append(MeasuredStep(100.0, measured_ms))
    correction = correction_of(noted.read())
    assert correction.factor == pytest.approx(1.0, abs=0.02)
    assert correction.error > 0.2


def test_only_the_latest_runs_under_the_same_conditions_count(tmp_path):
    other = StepConditions(CONDITIONS.run, "exchanges+next_ids")
    journal(tmp_path, other).append(MeasuredStep(1.0, 3.0))
    noted = journal(tmp_path)
    for i in range(MAX_STEPS + 5):
        noted.append(MeasuredStep(100.0, 100.0 + i))
    steps = noted.read()
    assert len(steps) == MAX_STEPS
    assert steps[-1].measured_ms == 100.0 + MAX_STEPS + 4


@pytest.mark.parametrize(
    "line",
    [
        '{"format": 1, "composed_ms": 0, "measured_ms": 1}',
        '{"format": 1, "composed_ms": 1, "measured_ms": 1e9}',
        '{"format": 1, "composed_ms": NaN, "measured_ms": 1}',
    ],
)
def test_damaged_lines_are_passed_over_with_one_warning(tmp_path, caplog, line):
    noted = journal(tmp_path)
    noted.append(MeasuredStep(100.0, 110.0))
    with noted.path.open("a") as file:
        file.write(f"{line}\n")
    noted.append(MeasuredStep(100.0, 120.0))
    with caplog.at_level(logging.WARNING):
        assert [step.measured_ms for step in noted.read()] == [110.0, 120.0]
    assert len(caplog.records) == 1


def test_a_step_that_its_parts_do_not_explain_is_not_written(tmp_path, caplog):
    noted = journal(tmp_path)
    assert not noted.append(MeasuredStep(10.0, 208.0))
    assert not noted.append(MeasuredStep(10.0, math.nan))
    assert not noted.path.exists()
    said, of_nan = caplog.messages
    assert "20.8 times as long as its parts" in said
    assert "measured_ms is nan" in of_nan


def test_the_limits_themselves_correct_other_steps(tmp_path):
    noted = journal(tmp_path)
    assert noted.append(MeasuredStep(10.0, 10.0 * FACTORS[0]))
    assert noted.append(MeasuredStep(10.0, 10.0 * FACTORS[1]))
    assert len(noted.read()) == 2


def test_lines_that_cannot_be_used_say_why(tmp_path, caplog):
    """Earlier versions wrote steps that they later called damaged."""
    noted = journal(tmp_path)
    noted.append(MeasuredStep(100.0, 110.0))
    [line] = noted.path.read_text().splitlines()
    with noted.path.open("a") as file:
        file.write(line.replace("110.0", "2080.0") + "\n" + '{"format": 2}\n' + line[:20])
    noted.append(MeasuredStep(100.0, 120.0))
    assert [step.measured_ms for step in noted.read()] == [110.0, 120.0]
    said, of_later = caplog.messages
    assert "line 2 (a step took 2080 ms, 20.8 times as long as its parts" in said
    assert said.endswith("line 4 (damaged)")
    assert "later version" in of_later
    assert of_later.endswith("line 3")
