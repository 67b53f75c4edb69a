"""Compares the plans of each sharder in a contest with those of one of them.

Plans are the rows of `tables.by_plan`, for each task in the same order of sharders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import geometric_mean

import polars as pl

from dlrm_sharded.runs.paired import PairedRatio, paired_ratio

Tally = tuple[int, int, int]
"""Numbers of tasks that a sharder wins, ties and loses against the reference."""


@dataclass(frozen=True, slots=True)
class Score:
    """A sharder's figures over all tasks.

    Args:
        plans: its rows of `by_plan`.
        num_solved: number of tasks that it has a plan for.
        ratio: its predicted cost over that of the reference, on the tasks in common, see
            `in_common`; None if there are none.
        mean_ratio: geometric mean of the same ratios.
        tally: by predicted costs. A plan where the other one has none is a win; tasks that neither
            solves do not count.
        measured: as `ratio`, of measured costs; None if nothing was measured.
        measured_tally: by the intervals of the rounds of each task.
    """

    sharder: str
    plans: pl.DataFrame
    num_solved: int
    ratio: PairedRatio | None
    mean_ratio: float | None
    tally: Tally
    measured: PairedRatio | None
    measured_tally: Tally

    def __str__(self) -> str:
        """The sharder with the costs that it planned by, as tables and pictures name it."""
        return str(self.plans["made_by"][0])


def in_common(plans: pl.DataFrame) -> pl.DataFrame:
    """Return the plans of tasks that all sharders solve, except sharders that solve none at all."""
    solved = plans.drop_nulls("cost_ms")
    return solved.filter(pl.len().over("task") == solved["sharder"].n_unique())


def scores(plans: pl.DataFrame, reference: str, *, margin: float) -> list[Score]:
    """Return the scores of all sharders in the order of their plans.

    Args:
        reference: sharder that the others are compared with, also in the columns of `plans`.
        margin: relative difference of predicted costs below which they are a tie.
    """
    common, found = in_common(plans), []
    # no plan is like an infinite cost; two of those have no ratio
    cost, other = (pl.col(name).fill_null(math.inf) for name in ("cost_ms", "reference_ms"))
    for (sharder,), rows in plans.group_by("sharder", maintain_order=True):
        ratios = rows.select(cost / other).to_series().drop_nans()
        measured = rows.drop_nulls("measured_low")
        ratio = _ratio(common, "cost_ms", str(sharder), reference)
        in_pairs = common.filter(pl.col("sharder") == sharder)["over_reference"]
        found.append(
            Score(
                sharder=str(sharder),
                plans=rows,
                num_solved=rows["cost_ms"].count(),
                ratio=ratio,
                mean_ratio=geometric_mean(in_pairs) if ratio else None,
                tally=_tally(ratios < 1 - margin, ratios > 1 + margin),
                measured=_ratio(common, "measured_ms", str(sharder), reference),
                measured_tally=_tally(measured["measured_high"] < 1, measured["measured_low"] > 1),
            )
        )
    return found


def _tally(wins: pl.Series, losses: pl.Series) -> Tally:
    num_wins, num_losses = int(wins.sum()), int(losses.sum())
    return num_wins, len(wins) - num_wins - num_losses, num_losses


def _ratio(plans: pl.DataFrame, cost: str, sharder: str, reference: str) -> PairedRatio | None:
    """Return the ratio of two sharders' costs on the same tasks; None if there are none."""
    own, other = (
        plans.filter(pl.col("sharder") == name)[cost].drop_nulls().to_list()
        for name in (sharder, reference)
    )
    if not own or not other or min(own + other) <= 0:  # a user's cost model may predict 0
        return None
    return paired_ratio(own, other)
