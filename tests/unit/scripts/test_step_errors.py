"""Errors of predicted steps, from the rows of the benchmark's part `steps`."""

import numpy as np
import pytest

from benchmarks import step_errors


def step_row(number, step_ms, predicted_ms, *, cost_ms=4.0):
    """Return a plan whose embeddings are predicted to take 4 ms, and their ids 1 ms."""
    return {
        "number": number,
        "sharders": ["dim"],
        "step_ms": step_ms,
        "predicted_ms": predicted_ms,
        "composed_ms": predicted_ms,
        "predicted_cost_ms": 4.0,
        "cost_ms": cost_ms,
        "predicted_input_dist_ms": 1.0,
        "input_dist_ms": 1.0,
    }


def test_a_wrong_choice_within_the_noise_is_a_tie():
    measured = np.array([10.0, 20.0, 10.0, 10.3, 10.0, 12.0])
    predicted = np.array([11.0, 21.0, 11.0, 10.0, 11.0, 10.0])
    numbers = np.array([0, 0, 1, 1, 2, 2])
    assert step_errors.picks(predicted, measured, numbers, margin=0.05) == (1, 1)


def test_the_report_has_the_error_of_every_prediction():
    text = step_errors.report([step_row(0, [10.0, 10.0], 11.0), step_row(0, [20.0, 20.0], 22.0)])
    assert "| predicted cost | 10.0 | 10.0 | +10.0 | 1 and 0 ties of 1 |" in text


def test_a_prediction_is_corrected_by_other_cases_than_its_own():
    # the third case is another one, so its own error remains, and it spoils the other two
    found = step_errors.factors_of_others(
        np.array([12.0, 12.0, 10.0]), np.full(3, 10.0), np.arange(3)
    )
    assert found == pytest.approx([1.2**-0.5, 1.2**-0.5, 1 / 1.2])


def test_prices_are_corrected_by_the_embeddings_of_other_cases():
    rows = [step_row(n, [10.0], 10.0, cost_ms=ms) for n, ms in enumerate((8.0, 4.0, 4.0))]
    found = step_errors.with_prices_corrected(rows, np.arange(3))
    # the others of the first case were predicted right, those of the second one by 2 on the mean
    assert found == pytest.approx([10.0, 10.0 + 4 * (2**0.5 - 1), 10.0 + 4 * (2**0.5 - 1)])
