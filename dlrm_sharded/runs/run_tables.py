"""Runs as tables: one with a row for each run, one with a row for each group of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from dlrm_sharded.runs.ranking import Standing
from dlrm_sharded.runs.result import METRICS, Platform, RunResult, setting_text
from dlrm_sharded.runs.run_folder import SUCCEEDED, Run

BASELINE = "random"
GAIN = "gain_against_random"
"""Throughput over that of the random run with the same seed, setting and platform, minus 1."""

PREDICTION_ERROR = "prediction_error"
"""Predicted embedding cost over the measured one, minus 1."""

RATIOS = {"fastest_over": "behind", "cost_over_fastest": "cost", "over_random": "gain"}
"""Columns of the summary by fields of a `Standing`."""

FIGURES = (*METRICS, GAIN, PREDICTION_ERROR)
CONDITIONS = ("setting", "world_size", "device", "versions")
GROUP = ("sharder", "costs", "options", *CONDITIONS)
"""Columns that runs must have in common to be averaged."""

_SCHEMA = {
    "run": pl.String,
    "sharder": pl.String,
    "costs": pl.String,
    "options": pl.String,
    "setting": pl.String,
    "world_size": pl.Int64,
    "device": pl.String,
    "versions": pl.String,
    "seed": pl.Int64,
    "state": pl.String,
    "reason": pl.String,
    "log": pl.String,
    "seconds": pl.Float64,
    "batch_size": pl.Int64,
    "commit": pl.String,
    "folder": pl.String,
    **dict.fromkeys(METRICS, pl.Float64),
}


def run_table(runs: Sequence[Run]) -> pl.DataFrame:
    """Return a row for each run, in their order; runs that did not succeed have no figures."""
    table = pl.DataFrame([_fields(run) for run in runs], schema=_SCHEMA)
    return _with_prediction_errors(_with_gains(table))


def summary_table(table: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each GROUP, in order of first runs: counts; mean, std and n of FIGURES."""
    succeeded = pl.col("state") == SUCCEEDED
    return table.group_by(GROUP, maintain_order=True).agg(
        pl.len().alias("runs"),
        succeeded.sum().alias("succeeded"),
        pl.col("seed").filter(succeeded).drop_nulls().n_unique().alias("seeds"),
        *(
            how(pl.col(name)).alias(f"{name}_{suffix}")
            for name in FIGURES
            for suffix, how in (("mean", pl.Expr.mean), ("std", pl.Expr.std), ("n", pl.Expr.count))
        ),
    )


def with_standings(summary: pl.DataFrame, standings: Sequence[Standing | None]) -> pl.DataFrame:
    """Add the ratios of each row's standing, with their intervals, and whether it is a tie.

    Args:
        standings: one for each row.
    """
    columns: dict[str, list[float | bool | None]] = {}
    for standing in standings:
        for name, key in RATIOS.items():
            ratio = None if standing is None else getattr(standing, key)
            for suffix in ("", "_low", "_high"):
                value = None if ratio is None else getattr(ratio, suffix[1:] or "ratio")
                columns.setdefault(f"{name}{suffix}", []).append(value)
            columns.setdefault(f"{name}_pairs", []).append(ratio and ratio.num_pairs)
        behind = None if standing is None else standing.behind
        columns.setdefault("tie", []).append(None if behind is None else behind.is_tie)
    return summary.with_columns(pl.Series(name, values) for name, values in columns.items())


def _fields(run: Run) -> dict[str, Any]:
    platform = run.platform or Platform()
    result = run.result or RunResult()
    return {
        "run": run.name,
        "sharder": run.sharder,
        "costs": run.costs,
        "options": setting_text(run.options),
        "setting": setting_text(run.setting),
        "world_size": platform.world_size,
        "device": platform.device,
        "versions": setting_text(platform.versions),
        "seed": run.seed,
        "state": run.state,
        "reason": run.reason,
        "log": run.log,
        "seconds": run.seconds,
        "batch_size": result.batch_size,
        "commit": result.commit,
        "folder": str(run.folder),
        **result.metrics,
    }


def _with_gains(table: pl.DataFrame) -> pl.DataFrame:
    """Add GAIN, against the mean where there are several random runs of a seed."""
    is_baseline = (pl.col("sharder") == BASELINE) & (pl.col("options") == "")
    throughput = pl.col("samples_per_s")
    baseline = throughput.filter(is_baseline & (throughput > 0)).mean().over(*CONDITIONS, "seed")
    has_pair = ~is_baseline & pl.col("seed").is_not_null()
    return table.with_columns(pl.when(has_pair).then(throughput / baseline - 1).alias(GAIN))


def _with_prediction_errors(table: pl.DataFrame) -> pl.DataFrame:
    measured = pl.col("embedding_cost_ms")
    error = pl.col("predicted_ms") / measured - 1
    return table.with_columns(pl.when(measured > 0).then(error).alias(PREDICTION_ERROR))
