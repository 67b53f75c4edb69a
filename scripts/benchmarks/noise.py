"""The noise of figures that were measured in rounds, from how the rounds vary."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from scipy.stats import norm

from studies.study import Row

CONFIDENCE = 0.95
"""Share of equal figures, or of groups of them, that do not differ by more than a margin."""

MEDIAN_FACTOR = math.sqrt(math.pi / 2)
"""Standard error of a median relative to that of a mean."""


def task_of(row: Row) -> tuple[object, ...]:
    """Return what identifies the task of a row within its study."""
    keys = ("set", "world_size", "number", "seed")
    return tuple(row.get(key) for key in keys)


def noise_of(rows: Iterable[Row], key: str) -> float:
    """Return the relative error of a median of rounds, from how the rounds of all rows vary.

    What all plans of a task have in common in a round, such as other work on the machine, does not
    count: it does not change their ratios.

    Args:
        key: name of the figures of the rounds, of which the plans of a task have equally many.
    """
    by_task: dict[tuple[object, ...], list[list[float]]] = {}
    for row in rows:
        if row.get(key) is not None:
            by_task.setdefault(task_of(row), []).append(row[key])
    squares, freedom, num_rounds = 0.0, 0, 1
    for rounds in by_task.values():
        logs = np.log(np.array(rounds))
        own = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
        squares += float(np.square(own).sum())
        freedom += (logs.shape[0] - 1) * (logs.shape[1] - 1)
        num_rounds = logs.shape[1]
    if freedom == 0:
        return 0.0
    return MEDIAN_FACTOR * math.sqrt(squares / freedom / num_rounds)


def noise_margin(noise: float, *, others: int = 1) -> float:
    """Return the relative difference up to which equal figures are likely to differ.

    Args:
        noise: relative standard error of each.
        others: number of figures with which one is compared, of which the best one is by luck
            better than each of them alone (Bonferroni's inequality).
    """
    quantile = float(norm.ppf(1 - (1 - CONFIDENCE) / 2 / others))
    return quantile * math.sqrt(2) * noise
