"""What the entries of a contest say of each sharder, in comparison with one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from dlrm_sharded.contest.entry import Entry, bound_ms
from dlrm_sharded.contest.measurement import Measurement
from dlrm_sharded.runs.paired import PairedRatio, paired_ratio

TIE = 1e-3
"""Relative difference of predicted costs, which have no noise, below which they are a tie."""

Costs = Mapping[str, Mapping[str, float]]
"""A cost in ms by sharder and task; tasks without a plan are missing."""


@dataclass(frozen=True, slots=True)
class Score:
    """A sharder's figures over all tasks.

    Args:
        num_tasks, num_solved: tasks that it was given, and that it has a plan for.
        ratio: its predicted cost over that of the reference, on the tasks in common, see
            `common_tasks`; None if there are none.
        mean_ratio: geometric mean of the same ratios.
        wins, ties, losses: tasks that it wins, ties and loses against the reference. A plan where
            the other one has none is a win; tasks that neither solves do not count.
        gaps: distance of each plan from the best bound of its task, relative, where there is one.
        seconds: of each case, with or without a plan.
        measured: as `ratio`, of measured costs; None if nothing was measured.
        measured_wins, measured_ties, measured_losses: tasks by the intervals of their rounds.
    """

    sharder: str
    num_tasks: int
    num_solved: int
    ratio: PairedRatio | None
    mean_ratio: float | None
    wins: int
    ties: int
    losses: int
    gaps: tuple[float, ...]
    seconds: tuple[float, ...]
    measured: PairedRatio | None = None
    measured_wins: int = 0
    measured_ties: int = 0
    measured_losses: int = 0


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
    costs = predicted_costs(entries)
    common = common_tasks(costs)
    bounds = bounds_ms(entries)
    measured_ms = measured_costs(measurements or {})
    found = []
    for sharder, by_task in costs.items():
        own = [entry for entry in entries if entry.sharder == sharder]
        ratio = _ratio(by_task, costs[reference], common)
        wins, ties, losses = _outcomes(by_task, costs[reference], margin)
        by_rounds = [
            one.ratios(reference)[sharder]
            for one in (measurements or {}).values()
            if {sharder, reference} <= one.rounds_ms.keys()
        ]
        found.append(
            Score(
                sharder,
                num_tasks=len(own),
                num_solved=len(by_task),
                ratio=ratio,
                mean_ratio=None
                if ratio is None
                else geometric_mean([by_task[task] / costs[reference][task] for task in common]),
                wins=wins,
                ties=ties,
                losses=losses,
                gaps=tuple(ms / bounds[task] - 1 for task, ms in by_task.items() if task in bounds),
                seconds=tuple(entry.solve_s for entry in own),
                measured=_ratio(
                    measured_ms.get(sharder, {}),
                    measured_ms.get(reference, {}),
                    common_tasks(measured_ms),
                ),
                measured_wins=sum(one.high < 1 for one in by_rounds),
                measured_ties=sum(one.is_tie for one in by_rounds),
                measured_losses=sum(one.low > 1 for one in by_rounds),
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


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of values; None if there are none."""
    return fmean(values) if values else None


def _ratio(
    of: Mapping[str, float], reference: Mapping[str, float], tasks: Sequence[str]
) -> PairedRatio | None:
    figures = [[costs[task] for task in tasks] for costs in (of, reference) if costs]
    if not tasks or len(figures) < 2 or min(map(min, figures)) <= 0:
        return None
    return paired_ratio(*figures)


def _outcomes(
    of: Mapping[str, float], reference: Mapping[str, float], margin: float
) -> tuple[int, int, int]:
    differences = [
        of.get(task, math.inf) / reference.get(task, math.inf) if task in of else math.inf
        for task in {*of, *reference}
    ]
    wins = sum(ratio < 1 - margin for ratio in differences)
    losses = sum(ratio > 1 + margin for ratio in differences)
    return wins, len(differences) - wins - losses, losses
