"""Figures of rows: sharders against a reference, task by task, with the noise of the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student_t

from dlrm_sharded.files.text_table import Column, TextTable
from studies.study import Row

REFERENCE = "neuroshard_paper"
TIE = 1e-3
"""Relative difference of predicted costs, which have no noise, below which they are a tie."""

CONFIDENCE = 0.95
"""Share of intervals that contain the mean, and of equal figures within a margin of noise."""

MEDIAN_FACTOR = math.sqrt(math.pi / 2)
"""Standard error of a median relative to that of a mean."""

Task = tuple[object, ...]
Costs = Mapping[str, Mapping[Task, float]]
"""A figure by sharder and task; tasks without it, as there is no plan, are missing."""


def task_of(row: Row) -> Task:
    """Return what identifies the task of a row within its study."""
    return tuple(row.get(key) for key in ("set", "world_size", "number", "seed"))


def costs_of(rows: Iterable[Row], key: str = "cost_ms") -> dict[str, dict[Task, float]]:
    """Return one figure of every row that has it."""
    costs: dict[str, dict[Task, float]] = {}
    for row in rows:
        by_task = costs.setdefault(row["sharder"], {})
        if row.get(key) is not None:
            by_task[task_of(row)] = float(row[key])
    return costs


@dataclass(frozen=True, slots=True)
class Versus:
    """A sharder's figure over another's.

    Args:
        num: tasks that both solve.
        mean, low, high: mean of the ratio on them, and its 95 % confidence interval (Student's t).
        wins, ties, losses: tasks that the sharder wins, ties and loses. Failing where the other one
            succeeds is a loss.
    """

    num: int
    mean: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int

    def __str__(self) -> str:
        if self.num < 2:
            return f"{self.mean:.4f}" if self.num else "-"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"

    @property
    def score(self) -> str:
        return f"{self.wins}/{self.ties}/{self.losses}"


def versus(costs: Costs, sharder: str, reference: str, *, margin: float = TIE) -> Versus:
    """Compare two sharders task by task; figures that differ by less than the margin are a tie."""
    found, other = costs[sharder], costs.get(reference, {})
    both = [task for task in found if task in other]
    ratios = np.array([found[task] / other[task] for task in both])
    wins, losses = int((ratios < 1 - margin).sum()), int((ratios > 1 + margin).sum())
    ties = len(both) - wins - losses
    wins, losses = wins + len(found) - len(both), losses + len(other) - len(both)
    return Versus(len(both), *mean_with_interval(ratios), wins, ties, losses)


def mean_with_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return the mean and both ends of its confidence interval.

    All are NaN for no values. The interval is infinite for one value.
    """
    num = len(values)
    if num < 2:
        mean = float(values[0]) if num else np.nan
        return mean, -np.inf if num else np.nan, np.inf if num else np.nan
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / num**0.5
    half = error * float(student_t.ppf((1 + CONFIDENCE) / 2, num - 1))
    return mean, mean - half, mean + half


def interval_text(values: Sequence[float] | np.ndarray, spec: str) -> str:
    """Write the mean and its interval, each in the format `spec`."""
    mean, low, high = mean_with_interval(values)
    return f"{mean:{spec}} [{low:{spec}}, {high:{spec}}]"


def sharders_of(rows: Iterable[Row]) -> list[str]:
    """Return the sharders in the order of their first rows."""
    return list(dict.fromkeys(row["sharder"] for row in rows))


def choose_reference(chosen: str | None, sharders: Sequence[str]) -> str:
    """Return the sharder that the others are compared with: by default, the published search."""
    return chosen or (REFERENCE if REFERENCE in sharders else sharders[0])


def noise_of(rows: Iterable[Row], key: str) -> float:
    """Return the relative error of a median of rounds, from how the rounds of all rows vary.

    What all plans of a task have in common in a round, such as other work on the machine, does not
    count: it does not change their ratios.

    Args:
        key: name of the figures of the rounds, of which the plans of a task have equally many.
    """
    by_task: dict[Task, list[list[float]]] = {}
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
    return max(TIE, quantile * math.sqrt(2) * noise)


def behind(costs: Costs, sharder: str, *, margin: float = TIE) -> dict[Task, str]:
    """Return the tasks on which a sharder is neither first nor tied, with the sharder that is."""
    found: dict[Task, str] = {}
    for task in dict.fromkeys(task for by_task in costs.values() for task in by_task):
        best = min((s for s in costs if task in costs[s]), key=lambda s: costs[s][task])
        if costs[sharder].get(task, math.inf) > costs[best][task] * math.exp(margin):
            found[task] = best
    return found


def sharder_table(
    rows: Sequence[Row],
    reference: str | None,
    ratios: Mapping[str, str],
    others: Mapping[str, Callable[[Sequence[Row]], object]] | None = None,
    *,
    noise: float = 0.0,
) -> str:
    """Write a line for each sharder, and on which tasks the reference is not the first one.

    Args:
        ratios: figures that are compared with the reference, by title; the first one decides on
            wins and losses.
        others: functions of a sharder's rows for further cells, by title.
        noise: relative standard error of the first figure.
    """
    reference, others = choose_reference(reference, sharders_of(rows)), others or {}
    costs = {title: costs_of(rows, key) for title, key in ratios.items()}
    first = next(iter(costs.values()))
    lines = []
    for sharder in sharders_of(rows):
        of_sharder = [row for row in rows if row["sharder"] == sharder]
        against = [versus(by_sharder, sharder, reference) for by_sharder in costs.values()]
        score = versus(first, sharder, reference, margin=noise_margin(noise)).score
        cells = [sharder, f"{len(first[sharder])}/{len(of_sharder)}", *against, score]
        lines.append([*cells, *(cell(of_sharder) for cell in others.values())])
    header = ["sharder", "plans", *(f"{title} / {reference} [95 %]" for title in costs)]
    table = TextTable([*header, "wins/ties/losses", *others], lines).markdown()
    margin = noise_margin(noise, others=max(1, len(first) - 1))
    ahead = behind(first, reference, margin=margin)
    num_tasks = len({task for by_task in first.values() for task in by_task})
    texts = [f"{reference} is first or tied on {num_tasks - len(ahead)} of {num_tasks} tasks."]
    for task, best in ahead.items():
        name = " ".join(str(part) for part in task if part is not None)
        if task in first[reference]:
            more = 100 * (first[reference][task] / first[best][task] - 1)
            texts.append(f"On task {name}, {best} is {more:.1f} % cheaper.")
        else:
            texts.append(f"On task {name}, {reference} finds no plan, and {best} does.")
    return "\n\n".join([table, "\n".join(texts)])


def prices_table(rows: Sequence[Row], by: Sequence[str]) -> str:
    """Write errors of predictions, and costs of plans over those of others, means over tasks.

    Args:
        rows: a plan of a task each, with `cost_ms` and the costs of others `over`; with
            `predicted_ms` and the `stated` error where there are prices, and `imbalance` where
            ranks were measured.
        by: names of the fields that tell lines apart.
    """
    lines = []
    for key in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        found = [row for row in rows if tuple(row[name] for name in by) == key]
        ratios = [r["predicted_ms"] / r["cost_ms"] for r in found if "predicted_ms" in r]
        cells: list[object] = [None, None]
        if ratios:
            cells = [float(np.exp(np.log(ratios).mean())), np.abs(np.array(ratios) - 1).mean()]
        cells.append(found[0].get("stated"))
        if "imbalance" in rows[0]:
            chosen = [
                row["predicted_ms"] / row["cost_ms"] / row["unchosen"]
                for row in found
                if row.get("unchosen")
            ]
            cells.append(interval_text(chosen, ".3f") if chosen else None)
            cells.append(float(np.mean([row["imbalance"] for row in found])))
        for other in found[0]["over"]:
            over = [row["cost_ms"] / row["over"][other] for row in found if other in row["over"]]
            dearer = sum(ratio > 1 + TIE for ratio in over)
            cells += [interval_text(over, ".3f"), max(over), f"{dearer} of {len(over)}"]
        lines.append([*key, *cells])
    columns: list[Column | str] = [name.replace("_", " ") for name in by]
    columns += [Column("predicted / true", ".2f"), Column("error", ".1%"), Column("stated", ".0%")]
    if "imbalance" in rows[0]:
        columns += ["chosen over unchosen [95 %]", Column("imbalance", ".2f")]
    for other in rows[0]["over"]:
        columns += [f"over {other} [95 %]", Column("worst", ".3f"), "dearer on"]
    return TextTable(columns, lines).markdown()


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through points on a log-log scale; nan for less than two."""
    if len(points) < 2:
        return math.nan
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def rows_table(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """Write a line for each row.

    Args:
        columns: formats of the cells by title, such as "{step_ms:.1f}".
    """
    lines = [[text.format(**row) for text in columns.values()] for row in rows]
    return TextTable(list(columns), lines).markdown()
