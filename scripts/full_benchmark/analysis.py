"""Comparisons of sharders in rows: task by task, with the noise of the same run, and failures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.noise import noise_margin, task_of
from studies.study import Row

PREDICTED_TIE = 1e-3
"""Relative difference of predicted costs, which have no noise, below which they are a tie."""


def sharders_of(rows: Iterable[Row]) -> list[str]:
    """Return the sharders in the order of their first rows."""
    return list(dict.fromkeys(row["sharder"] for row in rows))


def figures(rows: Iterable[Row], key: str) -> dict[str, dict[tuple[object, ...], float]]:
    """Return a figure by sharder and task; tasks without it are missing."""
    found: dict[str, dict[tuple[object, ...], float]] = {}
    for row in rows:
        of_sharder = found.setdefault(row["sharder"], {})
        if row.get(key) is not None:
            of_sharder[task_of(row)] = float(row[key])
    return found


def tie_margin(noise: float, *, others: int = 1) -> float:
    """Return the relative difference up to which a figure ties with others, see `noise_margin`."""
    return max(PREDICTED_TIE, noise_margin(noise, others=others))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A sharder against a reference, on all tasks of a study.

    Args:
        ratio: geometric mean of its figure over the reference's, on the tasks that both solve; nan
            for none.
        wins, ties, losses: number of tasks. Failing where the reference succeeds is a loss.
        num_both: tasks that both solve.
    """

    ratio: float
    wins: int
    ties: int
    losses: int
    num_both: int

    @property
    def score(self) -> str:
        return f"{self.wins}/{self.ties}/{self.losses}"


def compare(
    found: Mapping[str, Mapping[tuple[object, ...], float]],
    sharder: str,
    reference: str,
    *,
    margin: float,
) -> Comparison:
    """Compare two sharders on the tasks that at least one of them solves."""
    own, other = found[sharder], found[reference]
    both = own.keys() & other.keys()
    logs = np.array([math.log(own[task] / other[task]) for task in sorted(both, key=str)])
    wins = int((logs < -margin).sum()) + len(own.keys() - other.keys())
    losses = int((logs > margin).sum()) + len(other.keys() - own.keys())
    ratio = float(np.exp(logs.mean())) if len(logs) else math.nan
    ties = int((np.abs(logs) <= margin).sum())
    return Comparison(ratio, wins, ties, losses, len(logs))


def first_or_tied(
    found: Mapping[str, Mapping[tuple[object, ...], float]], sharder: str, *, margin: float
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """Return the tasks on which a sharder is first or tied with the first one, and the others."""
    tasks = dict.fromkeys(task for of_sharder in found.values() for task in of_sharder)
    first: list[tuple[object, ...]] = []
    behind: list[tuple[object, ...]] = []
    for task in tasks:
        best = min(of_sharder[task] for of_sharder in found.values() if task in of_sharder)
        own = found[sharder].get(task, math.inf)
        (first if math.log(own / best) <= margin else behind).append(task)
    return first, behind


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through points on a log-log scale; nan for less than two."""
    if len(points) < 2:
        return math.nan
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])
