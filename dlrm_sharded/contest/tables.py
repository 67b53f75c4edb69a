"""Entries as tables for programs: a row for each task, plan, rank or shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.contest.entry import Entry
from dlrm_sharded.contest.measurement import Measurement
from dlrm_sharded.contest.score import bounds_ms, predicted_costs
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, STAGE_LABELS, STAGES

MAX_COSTLIEST = 3
"""Number of tables that a diagnosis in short names."""

Row = dict[str, Any]
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
    for name, rows in tables.items():
        frame = pl.DataFrame(rows, infer_schema_length=None)
        with replaced_file(out / f"{name}.{file_format}") as file:
            frame.write_csv(file) if file_format == "csv" else frame.write_parquet(file)
    return [f"{name}.{file_format}" for name in tables]


def by_task(entries: Sequence[Entry]) -> list[Row]:
    """Return a row for each task: who has a plan, the best cost and the best bound."""
    bounds, rows = bounds_ms(entries), []
    for task in dict.fromkeys(entry.task for entry in entries):
        found = [entry for entry in entries if entry.task == task]
        costs = {entry.sharder: entry.cost.cost_ms for entry in found if entry.cost is not None}
        best = min(costs, key=lambda sharder: costs[sharder], default="")
        size = {"num_tables": found[0].num_tables, "world_size": found[0].world_size}
        num = {"num_sharders": len(found), "num_plans": len(costs)}
        best_of = {"best_sharder": best or None, "best_ms": costs.get(best)}
        bound = {"lower_bound_ms": bounds.get(task)}
        rows.append({"task": task, "kind": found[0].kind, **size, **num, **best_of, **bound})
    return rows


def by_plan(entries: Sequence[Entry], measurements: Measurements, reference: str) -> list[Row]:
    """Return a row for each task and sharder, with the diagnosis in short."""
    bounds = bounds_ms(entries)
    reference_ms = predicted_costs(entries).get(reference, {})
    rows = []
    for entry in entries:
        cost, ms = entry.cost, entry.cost and entry.cost.cost_ms
        bound, other_ms = bounds.get(entry.task), reference_ms.get(entry.task)
        rows.append(
            {
                **{"task": entry.task, "sharder": entry.sharder, "costs": entry.costs},
                "error": entry.error,
                **{"is_infeasible": entry.is_infeasible, "cost_ms": ms},
                "over_reference": ms / other_ms if ms and other_ms else None,
                "critical_path_ms": cost and cost.critical_path_ms,
                "imbalance": cost and cost.imbalance,
                "gap": ms / bound - 1 if ms and bound else None,
                **{"solve_s": entry.solve_s, "num_shards": len(entry.shards) or None},
                **{"peak_mib": entry.peak_mib, **diagnosis(entry)},
                **_measured(entry, measurements.get(entry.task), reference),
                "prices": entry.prices,
                **_topology(entry),
            }
        )
    return rows


def _topology(entry: Entry) -> Row:
    """Return the columns of a task that was put on a topology; none for other tasks."""
    if not entry.topology:
        return {}
    names = ("topology", "world_size", "num_hosts", "missing_bytes", "cost_model")
    return {name: getattr(entry, name) for name in names}


def diagnosis(entry: Entry) -> Row:
    """Return the slowest rank, the stage that takes longest there, and its costliest tables."""
    if entry.cost is None:
        return dict.fromkeys(("slowest_rank", "dominant_stage", "dominant_ms", "costliest_tables"))
    totals = [rank.total_ms for rank in entry.cost.per_rank]
    slowest = totals.index(max(totals))
    stages = entry.cost.per_rank[slowest]
    stage = max(STAGES, key=stages.stage_ms)
    by_table: dict[str, float] = {}
    for shard, times_ms in zip(entry.shards, entry.shard_ms, strict=False):  # none: not additive
        if shard.rank == slowest:
            by_table[shard.table] = by_table.get(shard.table, 0.0) + sum(times_ms)
    costliest = sorted(by_table, key=lambda table: -by_table[table])[:MAX_COSTLIEST]
    return {
        "slowest_rank": slowest,
        "dominant_stage": STAGE_LABELS[stage],
        "dominant_ms": stages.stage_ms(stage),
        "costliest_tables": ", ".join(f"{table} {by_table[table]:.3g} ms" for table in costliest),
    }


def by_rank(entries: Sequence[Entry], measurements: Measurements) -> list[Row]:
    """Return a row for each rank of each plan: stages, redistribution of ids, and memory."""
    rows = []
    for entry in entries:
        found = measurements.get(entry.task)
        for rank, stages in enumerate(entry.cost.per_rank if entry.cost else ()):
            ids_ms = entry.cost and entry.cost.input_dist_ms
            names = {"task": entry.task, "sharder": entry.sharder, "rank": rank}
            times = {**stages.to_json(), "total_ms": stages.total_ms}
            others = {"input_dist_ms": ids_ms and ids_ms[rank]}
            others["memory_bytes"] = entry.bytes_by_rank[rank]
            measured = found and found.costs[entry.sharder].per_rank[rank]
            if measured:
                times |= {f"measured_{name}_ms": measured.stage_ms(name) for name in COMPUTE_STAGES}
            rows.append({**names, **times, **others})
    return rows


def by_shard(entries: Sequence[Entry]) -> list[Row]:
    """Return a row for each shard of each plan."""
    rows = []
    for entry in entries:
        for place, shard in enumerate(entry.shards):
            names = {"task": entry.task, "sharder": entry.sharder, "table": shard.table}
            rows_of = {"first_row": shard.rows[0], "end_row": shard.rows[1]}
            cols_of = {"first_col": shard.cols[0], "end_col": shard.cols[1]}
            kind = {"replicated": shard.replicated, "precision": shard.precision}
            times_ms = entry.shard_ms[place] if entry.shard_ms else (None, None)
            times = dict(zip(("compute_ms", "comm_ms"), times_ms, strict=True))
            rows.append({**names, "rank": shard.rank, **rows_of, **cols_of, **kind, **times})
    return rows


def _measured(entry: Entry, found: Measurement | None, reference: str) -> Row:
    """Return the figures of a measured plan; none if nothing of its task was measured."""
    if found is None:
        return {}
    names = ("measured_ms", "measured_over_reference", "measured_low", "measured_high")
    if entry.sharder not in found.costs:
        return dict.fromkeys(names)
    ratio = found.ratios(reference).get(entry.sharder) if reference in found.costs else None
    figures = (None,) * 3 if ratio is None else (ratio.ratio, ratio.low, ratio.high)
    return dict(zip(names, (found.costs[entry.sharder].cost_ms, *figures), strict=True))
