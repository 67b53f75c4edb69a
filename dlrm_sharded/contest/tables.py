"""Entries as tables for programs: a row for each task, plan, rank or shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.contest.entry import Entry, Measurement
from dlrm_sharded.contest.score import bounds_ms, predicted_costs
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, STAGE_LABELS, STAGES

MAX_COSTLIEST = 3
"""Number of tables that a diagnosis in short names."""

Measurements = Mapping[str, Measurement]


def write_tables(
    entries: Sequence[Entry],
    measurements: Measurements,
    reference: str,
    out: Path,
    *,
    file_format: str,
) -> list[str]:
    """Write a file for each table, and return the names of the files."""
    tables = {
        "by_task": by_task(entries),
        "by_plan": by_plan(entries, measurements, reference),
        "by_rank": by_rank(entries, measurements),
        "by_shard": by_shard(entries),
    }
    for name, frame in tables.items():
        with replaced_file(out / f"{name}.{file_format}") as file:
            frame.write_csv(file) if file_format == "csv" else frame.write_parquet(file)
    return [f"{name}.{file_format}" for name in tables]


def by_task(entries: Sequence[Entry]) -> pl.DataFrame:
    """Return a row for each task: who has a plan, the best cost and the best bound."""
    bounds, rows = bounds_ms(entries), []
    for task in dict.fromkeys(entry.task for entry in entries):
        found = [entry for entry in entries if entry.task == task]
        costs = {entry.sharder: entry.cost.cost_ms for entry in found if entry.cost is not None}
        best = min(costs, key=lambda sharder: costs[sharder], default=None)
        rows.append(
            {
                "task": task,
                "kind": found[0].kind,
                "num_tables": found[0].num_tables,
                "world_size": found[0].world_size,
                "num_sharders": len(found),
                "num_plans": len(costs),
                "best_sharder": best,
                "best_ms": best and costs[best],
                "lower_bound_ms": bounds.get(task),
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def by_plan(entries: Sequence[Entry], measurements: Measurements, reference: str) -> pl.DataFrame:
    """Return a row for each task and sharder, with the diagnosis in short."""
    bounds = bounds_ms(entries)
    reference_ms = predicted_costs(entries).get(reference, {})
    rows = []
    for entry in entries:
        cost, ms = entry.cost, entry.cost and entry.cost.cost_ms
        bound, other_ms = bounds.get(entry.task), reference_ms.get(entry.task)
        row = {name: getattr(entry, name) for name in ("task", "sharder", "costs", "error")}
        row |= {
            "is_infeasible": entry.is_infeasible,
            "cost_ms": ms,
            "over_reference": ms / other_ms if ms and other_ms else None,
            "critical_path_ms": cost and cost.critical_path_ms,
            "imbalance": cost and cost.imbalance,
            "gap": ms / bound - 1 if ms and bound else None,
            "solve_s": entry.solve_s,
            "num_shards": len(entry.shards) or None,
            "peak_mib": entry.peak_mib,
        }
        row |= _diagnosis(entry) | _measured(entry, measurements.get(entry.task), reference)
        row["prices"] = entry.prices
        if entry.topology:
            names = ("topology", "world_size", "num_hosts", "missing_bytes", "cost_model")
            row |= {name: getattr(entry, name) for name in names}
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


def _diagnosis(entry: Entry) -> dict[str, Any]:
    """Return the slowest rank, the stage that takes longest there, and its costliest tables."""
    if entry.cost is None:
        return dict.fromkeys(("slowest_rank", "dominant_stage", "dominant_ms", "costliest_tables"))
    per_rank = entry.cost.per_rank
    slowest = max(range(len(per_rank)), key=lambda rank: per_rank[rank].total_ms)
    stage = max(STAGES, key=per_rank[slowest].stage_ms)
    by_table: dict[str, float] = {}
    for shard, times_ms in zip(entry.shards, entry.shard_ms, strict=False):  # none: not additive
        if shard.rank == slowest:
            by_table[shard.table] = by_table.get(shard.table, 0.0) + sum(times_ms)
    costliest = sorted(by_table, key=lambda table: -by_table[table])[:MAX_COSTLIEST]
    return {
        "slowest_rank": slowest,
        "dominant_stage": STAGE_LABELS[stage],
        "dominant_ms": per_rank[slowest].stage_ms(stage),
        "costliest_tables": ", ".join(f"{table} {by_table[table]:.3g} ms" for table in costliest),
    }


def _measured(entry: Entry, found: Measurement | None, reference: str) -> dict[str, Any]:
    """Return the figures of a measured plan; none if nothing of its task was measured."""
    if found is None:
        return {}
    cost = found.costs.get(entry.sharder)
    ratios = found.ratios(reference) if reference in found.costs else {}
    ratio = ratios.get(entry.sharder)
    return {
        "measured_ms": cost and cost.cost_ms,
        "measured_over_reference": ratio and ratio.ratio,
        "measured_low": ratio and ratio.low,
        "measured_high": ratio and ratio.high,
    }


def by_rank(entries: Sequence[Entry], measurements: Measurements) -> pl.DataFrame:
    """Return a row for each rank of each plan: stages, redistribution of ids, and memory."""
    frames = []
    for entry in entries:
        if entry.cost is None:
            continue
        columns: dict[str, Sequence[float] | None] = {}
        if entry.task in measurements:
            per_rank = measurements[entry.task].costs[entry.sharder].per_rank
            for stage in COMPUTE_STAGES:
                columns[f"measured_{stage}_ms"] = [rank.stage_ms(stage) for rank in per_rank]
        columns["input_dist_ms"] = entry.cost.input_dist_ms
        columns["memory_bytes"] = entry.bytes_by_rank
        frames.append(_with_columns(entry, entry.cost.to_frame(), columns))
    return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()


def by_shard(entries: Sequence[Entry]) -> pl.DataFrame:
    """Return a row for each shard of each plan."""
    frames = []
    for entry in entries:
        if entry.cost is not None:
            frame = ShardingPlan(entry.world_size, entry.shards).to_frame()
            compute_ms, comm_ms = (
                zip(*entry.shard_ms, strict=True) if entry.shard_ms else (None,) * 2
            )
            times = {"compute_ms": compute_ms, "comm_ms": comm_ms}
            frames.append(_with_columns(entry, frame, times))
    return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()


def _with_columns(
    entry: Entry, frame: pl.DataFrame, columns: Mapping[str, Sequence[float] | None]
) -> pl.DataFrame:
    """Put the names of a case before the columns of a frame, and others behind them."""
    names = [pl.lit(entry.task).alias("task"), pl.lit(entry.sharder).alias("sharder")]
    series = [
        pl.lit(None, pl.Float64).alias(name) if values is None else pl.Series(name, values)
        for name, values in columns.items()
    ]
    return frame.select(*names, pl.all(), *series)
