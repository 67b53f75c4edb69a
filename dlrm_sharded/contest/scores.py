"""Turns entries into the rows of frames, for each plan and rank, and scores sharders.

All figures of a comparison are computed once, in the columns of `by_plan`. Scores compare the plans
of each sharder with those of the reference, one of the sharders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from dlrm_sharded.contest.cases import Case, Entry, Measurement, Outcome, Setting
from dlrm_sharded.cost.base import provenance_of
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES
from dlrm_sharded.plans.plan_report import with_costs
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.runs.ranking import PairedRatio, paired_ratio

FIGURES = ("cost_ms", "excess_ms", "critical_path_ms", "imbalance")
MEASURED_FIGURES = ("measured_ms", "measured_over_reference", "measured_low", "measured_high")

Measurements = Mapping[str, Measurement]
Tally = tuple[int, int, int]
"""Numbers of tasks that a sharder wins, ties and loses against the reference."""


def write_tables(
    plans: pl.DataFrame, entries: Sequence[Entry], measurements: Measurements, setting: Setting
) -> list[str]:
    """Write a file for each table, and return the names of the files."""
    ranks = [rank_rows(entry, measurements) for entry in entries if entry.outcome.cost]
    by_rank = pl.concat(ranks, how="diagonal_relaxed") if ranks else pl.DataFrame()
    frames = {"by_plan": plans, "by_rank": by_rank}
    for name, frame in frames.items():
        with replaced_file(setting.out / f"{name}.{setting.file_format}") as file:
            frame.write_csv(file) if setting.file_format == "csv" else frame.write_parquet(file)
    return [f"{name}.{setting.file_format}" for name in frames]


def by_plan(entries: Sequence[Entry], measurements: Measurements, reference: str) -> pl.DataFrame:
    """Return a row for each task and sharder.

    Ratios to the reference's costs, and gaps to the best lower bound that any sharder's report
    proves for the task, are null where one of the two is missing. A bound above a plan's cost
    belongs to plans in another precision, and is left out.
    """
    rows = []
    for entry in entries:
        measured = _measured(entry.case, measurements.get(entry.case.task_name), reference)
        rows.append(_case_row(entry.case) | _plan_row(entry.outcome) | measured)
    types = dict.fromkeys((*FIGURES, *MEASURED_FIGURES, "lower_bound_ms"), pl.Float64)
    plans = pl.DataFrame(rows, infer_schema_length=None, schema_overrides=types)
    cost, excess, bound = map(pl.col, ("cost_ms", "excess_ms", "lower_bound_ms"))
    is_reference = pl.col("sharder") == reference
    holds = bound.is_between(0.0, (cost - excess).min(), closed="right")
    plans = plans.with_columns(
        reference_ms=cost.filter(is_reference).first().over("task"),
        measured_reference_ms=pl.col("measured_ms").filter(is_reference).first().over("task"),
        bound_ms=bound.filter(holds).max().over("task"),
    )
    return plans.with_columns(
        over_reference=cost / pl.col("reference_ms"), gap=(cost - excess) / pl.col("bound_ms") - 1
    )


def _case_row(case: Case) -> dict[str, Any]:
    """Return what is known of a case before it is planned."""
    topology, provenance = case.task.topology, provenance_of(case.planner.cost_model)
    model = type(case.planner.cost_model).__name__
    return {
        "task": case.task_name,
        **{name: getattr(case, name) for name in ("kind", "sharder", "topology")},
        "prices": case.costs_digest,
        "num_tables": len(case.task.tables),
        "costs": case.planner.costs,
        "made_by": with_costs(case.sharder, case.planner.costs),
        "world_size": topology.world_size,
        "num_hosts": topology.world_size // topology.ranks_per_host,
        "missing_gib": max(0, case.task.table_bytes - sum(topology.rank_memory_bytes)) / GIB,
        "cost_model": f"{provenance.hardware}: {provenance.short_text}" if provenance else model,
    }


def _plan_row(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a plan, which are None without one."""
    row = {name: getattr(outcome, name) for name in ("error", "lower_bound_ms", "solve_s")}
    if (cost := outcome.cost) is None:
        return row | dict.fromkeys((*FIGURES, "num_shards", "slowest_rank"))
    rank_ms = [rank.total_ms for rank in cost.per_rank]
    row |= {"num_shards": len(outcome.shards), "slowest_rank": rank_ms.index(max(rank_ms))}
    return row | {name: getattr(cost, name) for name in FIGURES}


def _measured(case: Case, found: Measurement | None, reference: str) -> dict[str, float | None]:
    """Return the figures of a measured plan; None for those that were not or cannot be measured."""
    if found is None or case.sharder not in found.costs:
        return dict.fromkeys(MEASURED_FIGURES)
    ratio = paired_ratio(found.rounds_ms[case.sharder], found.rounds_ms.get(reference, ()))
    ends = (None,) * 3 if ratio is None else (ratio.ratio, ratio.low, ratio.high)
    return dict(zip(MEASURED_FIGURES, (found.costs[case.sharder].cost_ms, *ends), strict=True))


def rank_rows(entry: Entry, measurements: Measurements) -> pl.DataFrame:
    """Return a row for each rank of a plan: stages, redistribution of ids, and memory."""
    case, cost = entry.case, entry.outcome.cost
    assert cost is not None
    input_dist_ms = cost.input_dist_ms or [None] * len(cost.per_rank)
    names = pl.lit(case.task_name).alias("task"), pl.lit(case.sharder).alias("sharder")
    frame = (
        cost.to_frame()
        .select(*names, pl.all())
        .with_columns(
            input_dist_ms=pl.Series(input_dist_ms, dtype=pl.Float64),
            memory_bytes=pl.Series(entry.plan.bytes_by_rank(case.task.topology)),
        )
    )
    if case.task_name not in measurements:
        return frame
    measured = measurements[case.task_name].costs[case.sharder].to_frame()
    computation = pl.col([f"{stage}_ms" for stage in COMPUTE_STAGES]).name.prefix("measured_")
    return pl.concat([frame, measured.select(computation)], how="horizontal")


@dataclass(frozen=True, slots=True)
class Score:
    """A sharder's figures over all tasks, by predicted and, if there are any, by measured costs.

    Args:
        plans: its rows of `by_plan`.
        ratios: by kind of costs, "predicted" or "measured": its cost over the reference's, on
            the tasks in common, see `in_common`; None if there are none.
        tallies: by the same kinds. By predicted costs, it is a win to have a plan where the other
            has none, and tasks that neither solves do not count; by measured costs, the intervals
            of rounds decide.
    """

    plans: pl.DataFrame
    ratios: Mapping[str, PairedRatio | None]
    tallies: Mapping[str, Tally]

    def __str__(self) -> str:
        """The sharder with the costs that it planned by, as tables and plots name it."""
        return str(self.plans["made_by"][0])

    @property
    def num_solved(self) -> int:
        return self.plans["cost_ms"].count()


def in_common(plans: pl.DataFrame) -> pl.DataFrame:
    """Return the plans of tasks that all sharders solve, apart from those that solve no task."""
    solved = plans.drop_nulls("cost_ms")
    return solved.filter(pl.len().over("task") == solved["sharder"].n_unique())


def scores(plans: pl.DataFrame, *, margin: float) -> list[Score]:
    """Return the scores of all sharders in the order of their plans.

    Args:
        margin: relative difference of predicted costs below which they are a tie.
    """
    found = []
    # no plan counts as an infinite cost; two of these have no ratio
    cost, other = (pl.col(name).fill_null(math.inf) for name in ("cost_ms", "reference_ms"))
    for (sharder,), rows in plans.group_by("sharder", maintain_order=True):
        common = in_common(plans).filter(pl.col("sharder") == sharder)
        over = rows.select(cost / other).to_series().drop_nans()
        ratios = {"predicted": paired_ratio(common["cost_ms"], common["reference_ms"])}
        tallies = {"predicted": _tally(over < 1 - margin, over > 1 + margin)}
        if plans["measured_ms"].count():
            figures = common["measured_ms"], common["measured_reference_ms"]
            known = rows.drop_nulls("measured_low")
            ratios["measured"] = paired_ratio(*figures)
            tallies["measured"] = _tally(known["measured_high"] < 1, known["measured_low"] > 1)
        found.append(Score(rows, ratios, tallies))
    return found


def _tally(wins: pl.Series, losses: pl.Series) -> Tally:
    num_wins, num_losses = int(wins.sum()), int(losses.sum())
    return num_wins, len(wins) - num_wins - num_losses, num_losses
