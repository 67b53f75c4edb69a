"""Entries as tables for programs: a row for each task, plan, rank or shard.

All figures of a comparison are computed once, in the columns of `by_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.contest.entry import Case, Entry, Measurement, Outcome
from dlrm_sharded.cost.base import standing_of
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, STAGE_LABELS, STAGES
from dlrm_sharded.plans.plan_report import with_costs
from dlrm_sharded.runs.ranking import paired_ratio

MAX_COSTLIEST = 3
"""Number of tables that a diagnosis in short names."""

FIGURES = ("cost_ms", "critical_path_ms", "imbalance", "dominant_ms", "solve_s", "peak_mib")
MEASURED = ("measured_ms", "measured_over_reference", "measured_low", "measured_high")

Measurements = Mapping[str, Measurement]


def write_tables(
    plans: pl.DataFrame,
    entries: Sequence[Entry],
    measurements: Measurements,
    out: Path,
    *,
    file_format: str,
) -> list[str]:
    """Write a file for each table, and return the names of the files."""
    tables = {
        "by_task": by_task(plans),
        "by_plan": plans,
        "by_rank": by_rank(entries, measurements),
        "by_shard": by_shard(entries),
    }
    for name, frame in tables.items():
        with replaced_file(out / f"{name}.{file_format}") as file:
            frame.write_csv(file) if file_format == "csv" else frame.write_parquet(file)
    return [f"{name}.{file_format}" for name in tables]


def by_task(plans: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each task: who has a plan, the best cost and the best bound."""
    is_best = pl.col("cost_ms") == pl.col("cost_ms").min()
    return plans.group_by("task", maintain_order=True).agg(
        pl.first("kind", "num_tables", "world_size"),
        num_sharders=pl.len(),
        num_plans=pl.count("cost_ms"),
        best_sharder=pl.col("sharder").filter(is_best).first(),
        best_ms=pl.min("cost_ms"),
        lower_bound_ms=pl.first("bound_ms"),
    )


def by_plan(entries: Sequence[Entry], measurements: Measurements, reference: str) -> pl.DataFrame:
    """Return a row for each task and sharder, with the diagnosis in short.

    Costs over those of the reference, and gaps to the best lower bound that any sharder's report
    proves for the task, are null where one of the two is missing. A bound above a plan's cost is of
    plans in another precision, and does not hold for all.
    """
    rows = []
    for entry in entries:
        measured = _measured(entry.case, measurements.get(entry.case.task_name), reference)
        rows.append(_case_row(entry.case) | _plan_row(entry.outcome) | measured)
    types = dict.fromkeys((*FIGURES, *MEASURED, "lower_bound_ms"), pl.Float64)
    plans = pl.DataFrame(rows, infer_schema_length=None, schema_overrides=types)
    cost, bound, is_reference = (
        pl.col("cost_ms"),
        pl.col("lower_bound_ms"),
        pl.col("sharder") == reference,
    )
    holds = bound.is_between(0.0, cost.min(), closed="right")
    plans = plans.with_columns(
        reference_ms=cost.filter(is_reference).first().over("task"),
        measured_reference_ms=pl.col("measured_ms").filter(is_reference).first().over("task"),
        bound_ms=bound.filter(holds).max().over("task"),
    )
    return plans.with_columns(
        over_reference=cost / pl.col("reference_ms"), gap=cost / pl.col("bound_ms") - 1
    )


def _case_row(case: Case) -> dict[str, Any]:
    """Return what is known of a case before it is planned."""
    topology, standing = case.task.topology, standing_of(case.planner.cost_model)
    model = type(case.planner.cost_model).__name__
    return {
        "task": case.task_name,
        "kind": case.kind,
        "num_tables": len(case.task.tables),
        "sharder": case.sharder,
        "costs": case.planner.costs,
        "made_by": with_costs(case.sharder, case.planner.costs),
        "prices": case.prices,
        "topology": case.topology,
        "world_size": topology.world_size,
        "num_hosts": topology.world_size // topology.ranks_per_host,
        "missing_bytes": max(0, case.task.table_bytes - sum(topology.rank_memory_bytes)),
        "cost_model": f"{standing.hardware}: {standing.short_text}" if standing else model,
    }


def _plan_row(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a plan, and of its slowest rank the stage that takes longest.

    They are None without a plan.
    """
    names = ("error", "is_infeasible", "lower_bound_ms", "solve_s", "peak_mib")
    row: dict[str, Any] = {name: getattr(outcome, name) for name in names}
    cost = outcome.cost
    if cost is None:
        return dict.fromkeys(FIGURES) | row
    slowest = max(range(len(cost.per_rank)), key=lambda rank: cost.per_rank[rank].total_ms)
    stage = max(STAGES, key=cost.per_rank[slowest].stage_ms)
    by_table: dict[str, float] = {}
    for shard, times_ms in zip(outcome.shards, outcome.shard_ms, strict=False):  # not additive
        if shard.rank == slowest:
            by_table[shard.table] = by_table.get(shard.table, 0.0) + sum(times_ms)
    costliest = sorted(by_table, key=lambda table: -by_table[table])[:MAX_COSTLIEST]
    return row | {
        "cost_ms": cost.cost_ms,
        "critical_path_ms": cost.critical_path_ms,
        "imbalance": cost.imbalance,
        "num_shards": len(outcome.shards),
        "slowest_rank": slowest,
        "dominant_stage": STAGE_LABELS[stage],
        "dominant_ms": cost.per_rank[slowest].stage_ms(stage),
        "costliest_tables": ", ".join(f"{table} {by_table[table]:.3g} ms" for table in costliest),
    }


def _measured(case: Case, found: Measurement | None, reference: str) -> dict[str, float | None]:
    """Return the figures of a measured plan; None where it or the reference was not measured."""
    if found is None or case.sharder not in found.costs:
        return dict.fromkeys(MEASURED)
    ratio = paired_ratio(found.rounds_ms[case.sharder], found.rounds_ms.get(reference, ()))
    ends = (None,) * 3 if ratio is None else (ratio.ratio, ratio.low, ratio.high)
    return dict(zip(MEASURED, (found.costs[case.sharder].cost_ms, *ends), strict=True))


def by_rank(entries: Sequence[Entry], measurements: Measurements) -> pl.DataFrame:
    """Return a row for each rank of each plan: stages, redistribution of ids, and memory."""
    frames = []
    for entry in entries:
        case, cost = entry.case, entry.outcome.cost
        if cost is None:
            continue
        columns: dict[str, Sequence[float] | None] = {"input_dist_ms": cost.input_dist_ms}
        columns["memory_bytes"] = entry.plan.bytes_by_rank(case.task.topology)
        if case.task_name in measurements:
            per_rank = measurements[case.task_name].costs[case.sharder].per_rank
            for stage in COMPUTE_STAGES:
                columns[f"measured_{stage}_ms"] = [rank.stage_ms(stage) for rank in per_rank]
        frames.append(_with_columns(case, cost.to_frame(), columns))
    return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()


def by_shard(entries: Sequence[Entry]) -> pl.DataFrame:
    """Return a row for each shard of each plan."""
    frames = []
    for entry in entries:
        if entry.outcome.cost is not None:
            shard_ms = list(zip(*entry.outcome.shard_ms, strict=True)) or (None, None)
            columns = dict(zip(("compute_ms", "comm_ms"), shard_ms, strict=True))
            frames.append(_with_columns(entry.case, entry.plan.to_frame(), columns))
    return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()


def _with_columns(
    case: Case, frame: pl.DataFrame, columns: Mapping[str, Sequence[float] | None]
) -> pl.DataFrame:
    """Put the names of a case before the columns of a frame, and others behind them."""
    names = [pl.lit(case.task_name).alias("task"), pl.lit(case.sharder).alias("sharder")]
    series = [
        pl.lit(None, pl.Float64).alias(name) if values is None else pl.Series(name, values)
        for name, values in columns.items()
    ]
    return frame.select(*names, pl.all(), *series)
