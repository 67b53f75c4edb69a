"""Compares the plans of each sharder in a contest with those of one of them.

Plans are the rows of `tables.by_plan`, for each task in the same order of sharders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import geometric_mean

import polars as pl

from dlrm_sharded.runs.ranking import PairedRatio, paired_ratio

Tally = tuple[int, int, int]
"""Numbers of tasks that a sharder wins, ties and loses against the reference."""


@dataclass(frozen=True, slots=True)
class Score:
    """A sharder's figures over all tasks.

    Args:
        plans: its rows of `by_plan`.
        ratio: its predicted cost over that of the reference, on the tasks in common, see
            `in_common`; None if there are none.
        mean_ratio: geometric mean of the same ratios.
        tally: by predicted costs. A plan where the other one has none is a win; tasks that neither
            solves do not count.
        measured: as `ratio`, of measured costs; None if nothing was measured.
        measured_tally: by the intervals of the rounds of each task.
    """

    plans: pl.DataFrame
    ratio: PairedRatio | None
    mean_ratio: float | None
    tally: Tally
    measured: PairedRatio | None
    measured_tally: Tally

    def __str__(self) -> str:
        """The sharder with the costs that it planned by, as tables and pictures name it."""
        return str(self.plans["made_by"][0])

    @property
    def num_solved(self) -> int:
        return self.plans["cost_ms"].count()


def in_common(plans: pl.DataFrame) -> pl.DataFrame:
    """Return the plans of tasks that all sharders solve, except sharders that solve none at all."""
    solved = plans.drop_nulls("cost_ms")
    return solved.filter(pl.len().over("task") == solved["sharder"].n_unique())


def scores(plans: pl.DataFrame, *, margin: float) -> list[Score]:
    """Return the scores of all sharders in the order of their plans.

    Args:
        margin: relative difference of predicted costs below which they are a tie.
    """
    found = []
    # no plan is like an infinite cost; two of those have no ratio
    cost, other = (pl.col(name).fill_null(math.inf) for name in ("cost_ms", "reference_ms"))
    for (sharder,), rows in plans.group_by("sharder", maintain_order=True):
        common = in_common(plans).filter(pl.col("sharder") == sharder)
        ratios = rows.select(cost / other).to_series().drop_nans()
        measured = rows.drop_nulls("measured_low")
        ratio = paired_ratio(common["cost_ms"], common["reference_ms"])
        found.append(
            Score(
                plans=rows,
                ratio=ratio,
                mean_ratio=geometric_mean(common["over_reference"]) if ratio else None,
                tally=_tally(ratios < 1 - margin, ratios > 1 + margin),
                measured=paired_ratio(common["measured_ms"], common["measured_reference_ms"]),
                measured_tally=_tally(measured["measured_high"] < 1, measured["measured_low"] > 1),
            )
        )
    return found


def _tally(wins: pl.Series, losses: pl.Series) -> Tally:
    num_wins, num_losses = int(wins.sum()), int(losses.sum())
    return num_wins, len(wins) - num_wins - num_losses, num_losses
