"""Compares the entries of each sharder in a contest with those of one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from dlrm_sharded.contest.entry import Entry, bound_ms
from dlrm_sharded.contest.measurement import Measurement
from dlrm_sharded.plans.plan_report import with_costs
from dlrm_sharded.runs.paired import PairedRatio, paired_ratio

TIE = 1e-3
"""Relative difference of predicted costs, which have no noise, below which they are a tie."""

Costs = Mapping[str, Mapping[str, float]]
"""A cost in ms by sharder and task; tasks without a plan are missing."""


Tally = tuple[int, int, int]
"""Numbers of tasks that a sharder wins, ties and loses against the reference."""


@dataclass(frozen=True, slots=True)
class Score:
    """A sharder's figures over all tasks.

    Args:
        num_tasks, num_solved: tasks that it was given, and that it has a plan for.
        ratio: its predicted cost over that of the reference, on the tasks in common, see
            `common_tasks`; None if there are none.
        mean_ratio: geometric mean of the same ratios.
        tally: by predicted costs. A plan where the other one has none is a win; tasks that neither
            solves do not count.
        gaps: distance of each plan from the best bound of its task, relative, where there is one.
        seconds: of each case, with or without a plan.
        measured: as `ratio`, of measured costs; None if nothing was measured.
        measured_tally: by the intervals of the rounds of each task.
        costs: name of the costs that the sharder planned by; None for none.
    """

    sharder: str
    num_tasks: int
    num_solved: int
    ratio: PairedRatio | None
    mean_ratio: float | None
    tally: Tally
    gaps: tuple[float, ...]
    seconds: tuple[float, ...]
    measured: PairedRatio | None = None
    measured_tally: Tally = (0, 0, 0)
    costs: str | None = None

    @property
    def made_by(self) -> str:
        """The sharder with the costs that it planned by, as tables and pictures name it."""
        return with_costs(self.sharder, self.costs)


def predicted_costs(entries: Iterable[Entry]) -> dict[str, dict[str, float]]:
    """Return the predicted costs of all sharders, also of those without any plan."""
    costs: dict[str, dict[str, float]] = {}
    for entry in entries:
        by_task = costs.setdefault(entry.sharder, {})
        if entry.cost is not None:
            by_task[entry.task] = entry.cost.cost_ms
    return costs


def common_tasks(costs: Costs) -> list[str]:
    """Return the tasks that all sharders solve, but for those that solve none at all."""
    solved = [by_task.keys() for by_task in costs.values() if by_task]
    return [task for task in solved[0] if all(task in keys for keys in solved)] if solved else []


def scores(
    entries: Sequence[Entry],
    reference: str,
    measurements: Mapping[str, Measurement] | None = None,
    *,
    margin: float = TIE,
) -> list[Score]:
    """Return the scores of all sharders in the order of their entries.

    Args:
        reference: sharder that the others are compared with.
        measurements: of plans, by task.
        margin: relative difference of predicted costs below which they are a tie.
    """
    costs, bounds = predicted_costs(entries), bounds_ms(entries)
    measured = measurements or {}
    measured_ms = measured_costs(measured)
    found = []
    for sharder, by_task in costs.items():
        seconds = tuple(entry.solve_s for entry in entries if entry.sharder == sharder)
        gaps = (ms / bounds[task] - 1 for task, ms in by_task.items() if task in bounds)
        found.append(
            Score(
                sharder,
                len(seconds),
                len(by_task),
                *_ratios(costs, sharder, reference),
                tally(by_task, costs[reference], margin),
                tuple(gaps),
                seconds,
                _ratios(measured_ms, sharder, reference)[0],
                _tally_of_rounds(measured.values(), sharder, reference),
                next(entry.costs for entry in entries if entry.sharder == sharder),
            )
        )
    return found


def bounds_ms(entries: Iterable[Entry]) -> dict[str, float]:
    """Return the best lower bound of each task that has one."""
    by_task: dict[str, list[Entry]] = {}
    for entry in entries:
        by_task.setdefault(entry.task, []).append(entry)
    bounds = {task: bound_ms(found) for task, found in by_task.items()}
    return {task: bound for task, bound in bounds.items() if bound}


def measured_costs(measurements: Mapping[str, Measurement]) -> dict[str, dict[str, float]]:
    """Return the measured costs of all sharders by task."""
    costs: dict[str, dict[str, float]] = {}
    for task, measured in measurements.items():
        for sharder, cost in measured.costs.items():
            costs.setdefault(sharder, {})[task] = cost.cost_ms
    return costs


def tally(of: Mapping[str, float], reference: Mapping[str, float], margin: float) -> Tally:
    """Compare costs task by task; those that differ by at most the margin are a tie."""
    ratios = [of.get(task, math.inf) / reference[task] for task in reference]
    only_here = len(of.keys() - reference.keys())
    wins = sum(ratio < 1 - margin for ratio in ratios)
    losses = sum(ratio > 1 + margin for ratio in ratios)
    return wins + only_here, len(ratios) - wins - losses, losses


def _tally_of_rounds(found: Iterable[Measurement], sharder: str, reference: str) -> Tally:
    ratios = [
        one.ratios(reference)[sharder]
        for one in found
        if {sharder, reference} <= one.rounds_ms.keys()
    ]
    wins, losses = (sum(ratio.high < 1 for ratio in ratios), sum(ratio.low > 1 for ratio in ratios))
    return wins, len(ratios) - wins - losses, losses


def _ratios(costs: Costs, sharder: str, reference: str) -> tuple[PairedRatio | None, float | None]:
    """Return the ratio on the tasks in common, and the geometric mean; None if there is none."""
    own, other, tasks = costs.get(sharder), costs.get(reference), common_tasks(costs)
    if not own or not other or not tasks:
        return None, None
    first, second = [own[task] for task in tasks], [other[task] for task in tasks]
    if min(first + second) <= 0:  # by a cost model that is not ours
        return None, None
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return paired_ratio(first, second), geometric_mean(ratios)
