"""Compares the entries of each sharder in a contest with those of one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from dlrm_sharded.contest.entry import Entry, Measurement
from dlrm_sharded.runs.paired import PairedRatio, paired_ratio

Costs = Mapping[str, Mapping[str, float]]
"""A cost in ms by sharder and task; tasks without a plan are missing."""

Tally = tuple[int, int, int]
"""Numbers of tasks that a sharder wins, ties and loses against the reference."""


@dataclass(frozen=True, slots=True)
class Score:
    """A sharder's figures over all tasks.

    Args:
        made_by: the sharder with the costs that it planned by, as tables and pictures name it.
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
    """

    sharder: str
    made_by: str
    num_tasks: int
    num_solved: int
    ratio: PairedRatio | None
    mean_ratio: float | None
    tally: Tally
    gaps: tuple[float, ...]
    seconds: tuple[float, ...]
    measured: PairedRatio | None
    measured_tally: Tally


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


def bounds_ms(entries: Iterable[Entry]) -> dict[str, float]:
    """Return the best lower bound that any sharder's report proves for each task that has one.

    A bound above a plan's cost is of plans in another precision, and does not hold for all.
    """
    least_ms: dict[str, float] = {}
    proven: dict[str, list[float]] = {}
    for entry in entries:
        if entry.cost is not None:
            cost_ms, bound_ms = entry.cost.cost_ms, entry.lower_bound_ms
            least_ms[entry.task] = min(least_ms.get(entry.task, math.inf), cost_ms)
            proven.setdefault(entry.task, []).append(bound_ms or 0.0)
    best = {
        task: max((ms for ms in bounds if ms <= least_ms[task]), default=0.0)
        for task, bounds in proven.items()
    }
    return {task: bound_ms for task, bound_ms in best.items() if bound_ms}


def scores(
    entries: Sequence[Entry],
    reference: str,
    measurements: Mapping[str, Measurement],
    *,
    margin: float,
) -> list[Score]:
    """Return the scores of all sharders in the order of their entries.

    Args:
        reference: sharder that the others are compared with.
        measurements: of plans, by task.
        margin: relative difference of predicted costs below which they are a tie.
    """
    costs, bounds = predicted_costs(entries), bounds_ms(entries)
    measured_costs = {
        sharder: {
            task: measured.costs[sharder].cost_ms
            for task, measured in measurements.items()
            if sharder in measured.costs
        }
        for sharder in costs
    }
    found = []
    for sharder, by_task in costs.items():
        own = [entry for entry in entries if entry.sharder == sharder]
        ratio, mean_ratio = _ratios(costs, sharder, reference)
        found.append(
            Score(
                sharder=sharder,
                made_by=own[0].made_by,
                num_tasks=len(own),
                num_solved=len(by_task),
                ratio=ratio,
                mean_ratio=mean_ratio,
                tally=tally(by_task, costs[reference], margin),
                gaps=tuple(ms / bounds[task] - 1 for task, ms in by_task.items() if task in bounds),
                seconds=tuple(entry.solve_s for entry in own),
                measured=_ratios(measured_costs, sharder, reference)[0],
                measured_tally=_measured_tally(measurements.values(), sharder, reference),
            )
        )
    return found


def tally(of: Mapping[str, float], reference: Mapping[str, float], margin: float) -> Tally:
    """Compare costs task by task; those that differ by at most the margin are a tie."""
    ratios = [of.get(task, math.inf) / reference[task] for task in reference]
    only_here = len(of.keys() - reference.keys())
    wins = sum(ratio < 1 - margin for ratio in ratios)
    losses = sum(ratio > 1 + margin for ratio in ratios)
    return wins + only_here, len(ratios) - wins - losses, losses


def _measured_tally(found: Iterable[Measurement], sharder: str, reference: str) -> Tally:
    of_tasks = [one.ratios(reference) for one in found if reference in one.costs]
    ratios = [of_task[sharder] for of_task in of_tasks if sharder in of_task]
    wins, losses = (sum(ratio.high < 1 for ratio in ratios), sum(ratio.low > 1 for ratio in ratios))
    return wins, len(ratios) - wins - losses, losses


def _ratios(costs: Costs, sharder: str, reference: str) -> tuple[PairedRatio | None, float | None]:
    """Return the ratio on the tasks in common, and the geometric mean; None if there is none."""
    tasks = common_tasks(costs)
    own, other = ([costs[of][task] for task in tasks if costs[of]] for of in (sharder, reference))
    if not own or not other or min(own + other) <= 0:  # costs of 0 are not of a model of ours
        return None, None
    return paired_ratio(own, other), geometric_mean(a / b for a, b in zip(own, other, strict=True))
