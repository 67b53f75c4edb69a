"""How far predicted steps are off, from the rows of `benchmark.py steps`.

Letters: P plans, of some cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import noise_margin, noise_of, task_of
from dlrm_sharded.files.text_table import TextTable
from studies.study import Row

LEAST_ERROR = 1e-3
"""Smaller relative errors count as this one in the geometric mean."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

HEADER = ("step from", "error %, geometric mean", "mean", "bias %", "fastest plan picked")


def report(rows: Sequence[Row]) -> str:
    """Write the errors of the predictions, and how often they pick the fastest plan."""
    noise = noise_of(rows, "step_ms")
    text = f"{len(rows)} plans; a measured step is off by {100 * noise:.1f} % (one standard error)."
    table = TextTable(HEADER, error_lines(rows, margin=noise_margin(noise)))
    return f"{text}\n\n{table.markdown()}"


def error_lines(rows: Sequence[Row], *, margin: float) -> list[list[str]]:
    """Return a line for each way to predict the steps.

    Args:
        margin: relative difference of measured steps up to which they are a tie.
    """
    measured = np.array([np.median(row["step_ms"]) for row in rows])
    tasks = [task_of(row) for row in rows]
    cases = np.array([tasks.index(task) for task in tasks])
    lines = []
    for name, predicted in _predictions(rows, measured, cases).items():
        errors = np.abs(predicted / measured - 1)
        picked, tied = picks(predicted, measured, cases, margin=margin)
        lines.append(
            [
                name,
                f"{100 * np.exp(np.log(np.maximum(errors, LEAST_ERROR)).mean()):.1f}",
                f"{100 * errors.mean():.1f}",
                f"{100 * np.expm1(np.log(predicted / measured).mean()):+.1f}",
                f"{picked} and {tied} ties of {len(set(tasks))}",
            ]
        )
    return lines


def picks(
    predicted: Floats, measured: Floats, cases: Integers, *, margin: float
) -> tuple[int, int]:
    """Return in how many cases the plan predicted fastest is so, and ties with it.

    Args:
        predicted: [P], steps in any unit.
        measured: [P], in the same unit.
        cases: [P], number of the case of a plan.
        margin: relative difference of measured steps up to which they are a tie.
    """
    picked = tied = 0
    for case in set(cases):
        of_case = cases == case
        chosen_ms = measured[of_case][predicted[of_case].argmin()]
        behind = np.log(chosen_ms / measured[of_case].min())
        picked += behind == 0
        tied += 0 < behind <= margin
    return int(picked), int(tied)


def factors_of_others(predicted: Floats, measured: Floats, cases: Integers) -> Floats:
    """Return how far the predictions of the other cases are off, as a factor for each plan, [P]."""
    logs = np.log(measured / predicted)
    others = [logs[cases != case] for case in cases]
    return np.exp([of_others.mean() if len(of_others) else 0.0 for of_others in others])


def with_prices_corrected(rows: Sequence[Row], cases: Integers) -> Floats:
    """Return predicted steps, [P], with prices that a journal of the other cases corrects.

    Their parts are of ranks that do one thing after the other, so that parts add up.
    """
    steps_ms = _figures(rows, "predicted_ms")
    for part in ("cost_ms", "input_dist_ms"):
        predicted, measured = _figures(rows, f"predicted_{part}"), _figures(rows, part)
        steps_ms += (factors_of_others(predicted, measured, cases) - 1) * predicted
    return steps_ms


def _predictions(rows: Sequence[Row], measured: Floats, cases: Integers) -> dict[str, Floats]:
    """Return the steps of all plans, [P], by what they are predicted from."""
    predicted, composed = _figures(rows, "predicted_ms"), _figures(rows, "composed_ms")
    return {
        "predicted cost": predicted,
        "predicted cost, prices corrected by the other cases": with_prices_corrected(rows, cases),
        "predicted cost, step corrected by them": (
            predicted * factors_of_others(predicted, measured, cases)
        ),
        "measured cost": composed,
        "measured cost, step corrected by them": (
            composed * factors_of_others(composed, measured, cases)
        ),
    }


def _figures(rows: Sequence[Row], key: str) -> Floats:
    return np.array([row[key] for row in rows])
