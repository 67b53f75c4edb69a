"""What the papers claim, beside what the sharders of their names do in the rows of a benchmark.

A claim of a paper is judged by the method as published: `neuroshard_paper`, `autoshard` and
`dreamshard`. This project's own search, `neuroshard`, answers for its own claims alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import Task, costs_of
from benchmarks.policies import HEURISTICS
from dlrm_sharded.files.text_table import TextTable
from studies.study import Row

Figure = Callable[[Sequence[Row], str], float | None]
"""A figure of a sharder in the rows of a study, or None if these do not have it."""

HUNDREDS = range(100, 1000)
SECONDS = 10.0
"""Longest time that counts as "in seconds"."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that somebody states of a sharder.

    Args:
        study, task_set: rows to look at; None for all sets of the study.
        least, most: what the figure must be for the claim to hold.
    """

    source: str
    sharder: str
    text: str
    figure: Figure
    study: str
    task_set: str | None = None
    least: float = 0.0
    most: float = np.inf

    def found(self, rows: Mapping[str, Sequence[Row]]) -> tuple[float | None, str]:
        """Return the figure, and whether the claim holds."""
        of_study = rows.get(self.study, ())
        chosen = [row for row in of_study if self.task_set in (None, row.get("set"))]
        figure = self.figure(chosen, self.sharder)
        if figure is None:
            return None, "no plan" if chosen else "not measured"
        return figure, "holds" if self.least <= figure <= self.most else "does not hold"


def over(other: str) -> Figure:
    """Return the figure: how many times as much the plans of another sharder cost, on average."""

    def mean_ratio(rows: Sequence[Row], sharder: str) -> float | None:
        costs = costs_of(rows)
        ratios = _ratios(costs.get(other, {}), costs.get(sharder, {}))
        return float(np.mean(ratios)) if ratios else None

    return mean_ratio


def best_heuristic(choose: Callable[[list[float]], float]) -> Figure:
    """Return the figure: how many times as much the plans of the best heuristic cost, on average.

    Args:
        choose: makes one figure of those of all sets of tasks.
    """

    def chosen(rows: Sequence[Row], sharder: str) -> float | None:
        found = []
        for task_set in dict.fromkeys(row.get("set") for row in rows):
            of_set = [row for row in rows if row.get("set") == task_set]
            ratios = [over(heuristic)(of_set, sharder) for heuristic in HEURISTICS]
            found += [min((r for r in ratios if r is not None), default=None)]
        known = [ratio for ratio in found if ratio is not None]
        return choose(known) if known else None

    return chosen


def seconds(rows: Sequence[Row], sharder: str) -> float | None:
    """Return the longest time to plan hundreds of tables."""
    found = [row for row in rows if row["sharder"] == sharder and row["num_tables"] in HUNDREDS]
    return max((row["solve_s"] for row in found), default=None)


def _ratios(costs: Mapping[Task, float], others: Mapping[Task, float]) -> list[float]:
    return [costs[task] / others[task] for task in costs if task in others]


NEUROSHARD, DREAMSHARD = "NeuroShard (arXiv:2305.01868)", "DreamShard (arXiv:2210.02023)"
AUTOSHARD, OURS = "AutoShard (arXiv:2208.06399)", "this project"
TRANSFERS = "transfers to other models and ranks: the best heuristic costs no less"
PRODUCTION, PLANNED, MODELS = "production", "planned", "models"

_neuroshard = functools.partial(Claim, NEUROSHARD, "neuroshard_paper")
_dreamshard = functools.partial(Claim, DREAMSHARD, "dreamshard")
_autoshard = functools.partial(Claim, AUTOSHARD, "autoshard")
_ours = functools.partial(Claim, OURS, "neuroshard")
_at_most, _at_least = best_heuristic(max), best_heuristic(min)

CLAIMS: tuple[Claim, ...] = (
    _neuroshard(
        "random costs 2.14 x on a production model", over("random"), PRODUCTION, least=2.14
    ),
    _neuroshard("TorchRec's planner costs 1.57 x on it", over("torchrec"), PRODUCTION, least=1.57),
    _dreamshard("hundreds of tables in under a second", seconds, "scaling", most=1.0),
    _dreamshard("the best heuristic costs up to 1.19 x", _at_most, "policies", least=1.19),
    _dreamshard(TRANSFERS, _at_least, PLANNED, MODELS, least=1.0),
    _autoshard("hundreds of tables in seconds", seconds, "scaling", most=SECONDS),
    _autoshard(TRANSFERS, _at_least, PLANNED, MODELS, least=1.0),
    _ours("random costs 1.5 x", over("random"), PLANNED, "paper", least=1.5),
    _ours("torchrec costs 1.05 x", over("torchrec"), PLANNED, "paper", least=1.05),
)


def claims_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """Write a line for each claim: whose it is, which sharder answers for it, and what it does."""
    lines = []
    for claim in CLAIMS:
        figure, verdict = claim.found(rows)
        study = f"{claim.study}, {claim.task_set}" if claim.task_set else claim.study
        text = None if figure is None else f"{figure:.2f} {'s' if claim.figure is seconds else 'x'}"
        lines.append((claim.source, claim.text, f"`{claim.sharder}`", text, study, verdict))
    return TextTable(["source", "claim", "sharder", "found", "study", ""], lines).markdown()
