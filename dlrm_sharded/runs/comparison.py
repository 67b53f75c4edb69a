"""Turns runs into two frames: one with a row for each run, and one with a row for each group.

Runs form a group if their figures may be averaged: they have the same sharder, costs, options and
setting, and the same hardware and software.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.plans.plan_report import with_costs
from dlrm_sharded.runs.ranking import NO_RANKING, NO_RATIOS, Ranking, Ratios, measured, rank
from dlrm_sharded.runs.result import METRICS, RunResult, setting_text
from dlrm_sharded.runs.rounds import Round, mean_figures, undisturbed_rounds
from dlrm_sharded.runs.run_folder import SUCCEEDED, Run

BASELINE = "random"
PREDICTION_ERROR = "prediction_error"
"""Predicted over measured embedding cost, minus 1."""

FIGURES = (*METRICS, PREDICTION_ERROR)
HARDWARE = {"ranks": "world_size", "ranks per host": "ranks_per_host", "device": "device"}
SOURCES = {**HARDWARE, "measured in": "measured_in"}
"""Columns by their titles in texts. Runs without rounds are measured in their training alone."""

PLATFORM = (*SOURCES.values(), "versions")
CONDITIONS = ("setting", *PLATFORM)
"""Columns in which runs must agree to be ranked against each other."""

OF_RUN = ("sharder", "options", "setting", "seed", "state", "reason", "log", "seconds")
OF_RESULT = (*HARDWARE.values(), "batch_size", "commit", "prices", "prices_digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the summary.

    Args:
        conditions: by title, what distinguishes rows with the same label.
        fields: values of the summary by column.
        ratios: ratios to the fastest and the random row of the same setting and platform.
    """

    label: str
    conditions: Mapping[str, str]
    fields: Mapping[str, Any]
    ratios: Ratios

    def is_reference(self, name: str) -> bool:
        """Return whether the other rows' ratios of this name are over this row."""
        is_first = self.ratios is not NO_RATIOS and self.ratios["time_over_fastest"] is None
        return self.label == BASELINE if name == "time_over_random" else is_first

    def spread(self, figure: str) -> tuple[float, float, int]:
        """Return mean and standard deviation (n - 1) of a figure, and how many runs have it.

        The mean of no runs and the deviation of one run are 0.
        """
        mean, std, num = (self.fields[f"{figure}_{part}"] for part in ("mean", "std", "n"))
        return mean or 0.0, std or 0.0, num


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs, grouped and averaged.

    Args:
        table: a row for each run, with the figures of its training.
        rows: a row for each group of runs, as texts and plots show them; with rounds, `FIGURES` of
            `rounds` are means over the undisturbed ones.
        conclusions: sentences that say which sharder is the fastest in each setting.
        problems: messages about files that could not be read.
    """

    table: pl.DataFrame
    rows: Sequence[Row]
    conclusions: Sequence[str]
    problems: Sequence[str]

    @property
    def summary(self) -> pl.DataFrame:
        """The rows as a frame."""
        rows = [{**row.fields, **_ratio_fields(row.ratios)} for row in self.rows]
        return pl.DataFrame(rows, infer_schema_length=None)


def summarize(runs: Sequence[Run], problems: Sequence[str] = ()) -> Comparison:
    """Group and average runs, and pair them with the fastest and the random ones.

    Within a setting and platform, random rows come first. The others follow from the slowest to the
    fastest by pairs of runs, then from the highest to the lowest mean embedding cost, and by name
    if no cost is known.
    """
    runs = sorted(runs, key=lambda run: _by_number(run.setting))
    rounds: dict[Path, dict[int, Round]] = {}
    means: dict[Path, dict[str, float]] = {}
    for sweep in {run.sweep for run in runs}:
        folders = (run.folder for run in runs if run.sweep == sweep and run.result)
        rounds |= (of_sweep := undisturbed_rounds(folders))
        means |= mean_figures(of_sweep)
    table = run_table(runs, {folder: {} for folder in rounds})
    rankings = _rankings(table, runs, rounds)
    found = summary_table(run_table(runs, means)).to_dicts()
    groups = [tuple(map(fields.get, CONDITIONS)) for fields in found]
    of_group = [rankings.get(group, NO_RANKING) for group in groups]
    rows = [
        Row(
            label=fields["label"],
            conditions=conditions,
            fields=fields,
            ratios=ranking.ratios.get(fields["label"], NO_RATIOS),
        )
        for fields, conditions, ranking in zip(found, _conditions(found), of_group, strict=True)
    ]
    rows.sort(key=_order)
    named = {group: _named(of) for group, of in zip(groups, _conditions(found), strict=True)}
    conclusions = [
        f"{named[group]}: {text}" if len(rankings) > 1 else text
        for group, ranking in rankings.items()
        for text in filter(None, (ranking.conclusion(), ranking.relation()))
    ]
    return Comparison(table=table, rows=rows, conclusions=conclusions, problems=problems)


def run_table(runs: Sequence[Run], in_rounds: Mapping[Path, dict[str, float]]) -> pl.DataFrame:
    """Return a row for each run, in their order; runs that did not succeed have no figures.

    These get the hardware, software and costs that the other runs share.

    Args:
        in_rounds: by the folders of runs with rounds, figures that replace those of the training.
    """
    types = dict.fromkeys(METRICS, pl.Float64)
    rows = [
        {**_fields(run), "measured_in": "rounds" if run.folder in in_rounds else "training"}
        | in_rounds.get(run.folder, {})
        for run in runs
    ]
    table = pl.DataFrame(rows, infer_schema_length=None, schema_overrides=types).with_columns(
        _filled("costs", "sharder", "options"), *(_filled(name, "sweep") for name in PLATFORM)
    )
    labels = [
        with_costs(f"{sharder} ({options})" if options else sharder, costs or None)
        for sharder, options, costs in table.select("sharder", "options", "costs").rows()
    ]
    cost = pl.col("embedding_cost_ms")
    error = pl.when(cost > 0).then(pl.col("predicted_ms") / cost - 1)
    return table.with_columns(pl.Series("label", labels), error.alias(PREDICTION_ERROR))


def summary_table(table: pl.DataFrame) -> pl.DataFrame:
    """Return counts, and mean, std and n of FIGURES, by group in order of their first runs."""
    succeeded = pl.col("state") == SUCCEEDED
    return table.group_by(
        "label", "sharder", "costs", "options", *CONDITIONS, maintain_order=True
    ).agg(
        pl.len().alias("runs"),
        succeeded.sum().alias("succeeded"),
        pl.col("seed").filter(succeeded).drop_nulls().n_unique().alias("seeds"),
        pl.col(FIGURES).mean().name.suffix("_mean"),
        pl.col(FIGURES).std().name.suffix("_std"),
        pl.col(FIGURES).count().name.suffix("_n"),
    )


def _fields(run: Run) -> dict[str, Any]:
    result = run.result or RunResult()
    return {
        "run": run.name,
        **{name: getattr(run, name) for name in OF_RUN},
        **{name: getattr(result, name) for name in OF_RESULT},
        "costs": (result.costs or "") if run.result else None,
        "versions": setting_text(result.versions or {}) or None,
        "sweep": str(run.sweep),
        "folder": str(run.folder),
        "hosts": ", ".join(sorted(result.hosts or {})) or None,
        **result.metrics,
    }


def _filled(name: str, *group: str) -> pl.Expr:
    """Give runs that did not succeed the value that all others in their group share."""
    succeeded = pl.col("state") == SUCCEEDED
    known = pl.col(name).filter(succeeded)
    shared = pl.when(known.n_unique() == 1).then(known.first())
    return pl.when(succeeded).then(name).otherwise(shared.over(group)).alias(name)


def _rankings(
    table: pl.DataFrame, runs: Sequence[Run], rounds: Mapping[Path, Mapping[int, Round]]
) -> dict[tuple[Any, ...], Ranking]:
    """Return the rankings of runs that share CONDITIONS, by their rounds or else their training."""
    measurements: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    groups = table.select("label", *CONDITIONS).rows()
    for run, (label, *conditions) in zip(runs, groups, strict=True):
        if run.result is not None:
            training = {-1: run.result}  # counts as a round
            rows = measured(label, run.seed, run.folder, rounds.get(run.folder, training))
            measurements.setdefault(tuple(conditions), []).extend(rows)
    rankings = {key: rank(rows, baseline=BASELINE) for key, rows in measurements.items()}
    return {key: ranking for key, ranking in rankings.items() if ranking.ratios}


def _named(conditions: Mapping[str, str]) -> str:
    parts = [
        value if title == "setting" else f"{title} {value}" for title, value in conditions.items()
    ]
    return ", ".join(filter(None, parts))


def _order(row: Row) -> tuple[object, ...]:
    fields, behind = row.fields, row.ratios["time_over_fastest"]
    return (
        [_by_number(str(fields[name] or "")) for name in CONDITIONS],
        fields["sharder"] != BASELINE,
        row.ratios is NO_RATIOS,
        0.0 if behind is None else -behind.ratio,
        -(fields["embedding_cost_ms_mean"] or 0.0),
        _by_number(row.label),
    )


def _conditions(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield, for each row, its values of the conditions in which any two rows differ."""
    texts = {
        "setting": without_common([row["setting"] for row in rows])[1],
        **{title: [str(row[name] or "unknown") for row in rows] for title, name in SOURCES.items()},
        "versions": without_common([row["versions"] or "unknown" for row in rows])[1],
    }
    differing = {title: of_title for title, of_title in texts.items() if len({*of_title}) > 1}
    for place in range(len(rows)):
        yield {title: of_title[place] for title, of_title in differing.items()}


def without_common(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words key=value that all texts have in common, and each text without them."""
    words = [text.split() for text in texts]
    common = set(words[0]).intersection(*words)
    shown = [" ".join(word for word in of_text if word not in common) for of_text in words]
    return " ".join(word for word in words[0] if word in common), [text or "-" for text in shown]


def _ratio_fields(ratios: Ratios) -> dict[str, float | bool | None]:
    """Return the columns of ratios and their intervals, and whether the row ties."""
    fields: dict[str, float | bool | None] = {}
    for name, ratio in ratios.items():
        names = (name, f"{name}_low", f"{name}_high", f"{name}_pairs")
        values = [None] * 4 if ratio is None else dataclasses.astuple(ratio)
        fields |= dict(zip(names, values, strict=True))
    behind = ratios["time_over_fastest"]
    return {**fields, "tie": None if behind is None else behind.is_tie}


def _by_number(text: str) -> list[str | int]:
    """Return a sort key that puts batch_size=256 before batch_size=1024."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]
