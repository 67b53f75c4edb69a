"""Group runs whose figures may be averaged, and put the groups in order."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from dlrm_sharded.plans.plan_report import with_costs
from dlrm_sharded.runs.disturbance import disturbance_text
from dlrm_sharded.runs.ranking import (
    MeasuredRun,
    Measurement,
    Ranking,
    Standing,
    measured_in_rounds,
    plan_id,
    rank,
)
from dlrm_sharded.runs.result import Platform, RunResult, Setting, setting_text
from dlrm_sharded.runs.rounds import read_rounds
from dlrm_sharded.runs.run_folder import Run
from dlrm_sharded.runs.run_tables import (
    BASELINE,
    FIGURES,
    run_table,
    summary_table,
    with_standings,
)

Group = tuple[Run, ...]
Shared = tuple[Setting, Platform | None]
"""Setting and platform, which runs must share to be ranked."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several runs; `std` (n - 1) is None for one."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Runs whose figures may be averaged, and their figures.

    Args:
        conditions: by title, the settings that distinguish rows of the same sharder.
        figures: spreads of the FIGURES that at least one run knows.
        standing: in comparison with the fastest row of the same setting and platform; None without
            a pair of runs.
    """

    sharder: str
    conditions: Mapping[str, str]
    runs: Group
    figures: Mapping[str, Spread]
    standing: Standing | None = None

    @property
    def results(self) -> list[RunResult]:
        """Results of the runs that succeeded."""
        return [run.result for run in self.runs if run.result is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs, grouped and averaged.

    Args:
        table: one row for each run, from `run_table`.
        summary: one row for each group of runs, from `summary_table`.
        rows: the rows of the summary, as texts and tables show them.
        common: overrides that all runs have.
        problems: messages about files that could not be read.
        rankings: who is faster, with the setting that the runs share; none without pairs.
    """

    table: pl.DataFrame
    summary: pl.DataFrame
    rows: tuple[Row, ...]
    common: Setting
    problems: tuple[str, ...]
    rankings: tuple[tuple[Setting, Ranking], ...] = ()

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @property
    def has_one_set_of_prices(self) -> bool:
        """Return whether all predictions are by the same prices, as far as is known."""
        results = [result for row in self.rows for result in row.results]
        return len({result.prices_digest for result in results}) < 2


def summarize(runs: Sequence[Run], problems: Sequence[str] = ()) -> Comparison:
    """Group runs, pair them with the fastest and the random ones, and average.

    Within a setting and platform, the random rows come first; others follow from the slowest to the
    fastest by pairs of runs, then from the highest mean embedding cost to the lowest, and by name
    where no cost is known.
    """
    groups = _groups(_with_costs(_with_platforms(runs)))
    rankings = _rankings(groups)
    standings = {
        (*shared, standing.label): standing
        for shared, ranking in rankings.items()
        for standing in ranking.standings
    }

    def standing_of(group: Group) -> Standing | None:
        return standings.get((group[0].setting, group[0].platform, _label(group[0])))

    groups.sort(key=lambda group: _order(group, standing_of(group)))
    table = run_table([run for group in groups for run in group])
    summary = summary_table(table)
    common = _common([group[0].setting for group in groups])
    rows = tuple(
        Row(
            sharder=_label(group[0]),
            conditions=conditions,
            runs=group,
            figures=_figures(fields),
            standing=standing_of(group),
        )
        for group, conditions, fields in zip(
            groups, _conditions(groups, common), summary.iter_rows(named=True), strict=True
        )
    )
    return Comparison(
        table=table,
        summary=with_standings(summary, [row.standing for row in rows]),
        rows=rows,
        common=common,
        problems=tuple(problems),
        rankings=tuple((setting, ranking) for (setting, _), ranking in rankings.items()),
    )


def _label(run: Run) -> str:
    options = f" ({setting_text(run.options)})" if run.options else ""
    return with_costs(run.sharder + options, run.costs)


def _rankings(groups: Sequence[Group]) -> dict[Shared, Ranking]:
    """Return the ranking of the runs of each setting and platform that have pairs."""
    by_setting: dict[Shared, list[Run]] = {}
    for group in groups:
        shared = group[0].setting, group[0].platform
        by_setting.setdefault(shared, []).extend(run for run in group if run.succeeded)
    rankings = {shared: _ranking(of_setting) for shared, of_setting in by_setting.items()}
    return {shared: ranking for shared, ranking in rankings.items() if ranking is not None}


def _ranking(runs: Sequence[Run]) -> Ranking | None:
    """Rank runs by their rounds, or by their trainings if not all of them have rounds."""
    rounds = [read_rounds(run.folder) for run in runs]
    has_rounds = all(rounds)
    measured = [
        measured_in_rounds(run.folder, _label(run), run.seed or 0, of_run)
        if has_rounds
        else _trained(run)
        for run, of_run in zip(runs, rounds, strict=True)
    ]
    ranking = rank(measured, baseline=BASELINE, has_rounds=has_rounds)
    if ranking is None or not has_rounds:
        return ranking
    return dataclasses.replace(ranking, disturbance=disturbance_text(rounds))


def _trained(run: Run) -> MeasuredRun:
    result = run.result or RunResult()
    measurement = Measurement(result.samples_per_s or 0.0, result.embedding_cost_ms or 0.0)
    return MeasuredRun(_label(run), run.seed or 0, plan_id(run.folder), {0: measurement})


def _groups(runs: Sequence[Run]) -> list[Group]:
    """Put together the runs whose figures may be averaged, by seed and name."""
    by_key: dict[object, list[Run]] = {}
    for run in runs:
        key = (run.sharder, run.costs, run.options, run.setting, run.platform)
        by_key.setdefault(key, []).append(run)
    return [
        tuple(sorted(group, key=lambda run: (-1 if run.seed is None else run.seed, run.name)))
        for group in by_key.values()
    ]


def _order(group: Group, standing: Standing | None) -> tuple[object, ...]:
    run, platform = group[0], group[0].platform or Platform()
    results = [run.result for run in group if run.result is not None]
    costs_ms = [r.embedding_cost_ms for r in results if r.embedding_cost_ms is not None]
    return (
        _by_number(setting_text(run.setting)),
        (platform.world_size or -1, platform.device or "", platform.versions),
        run.sharder != BASELINE,
        standing is None,
        0.0 if standing is None or standing.behind is None else -standing.behind.ratio,
        -statistics.fmean(costs_ms) if costs_ms else 0.0,
        run.sharder,
        _by_number(setting_text(run.options)),
    )


def _figures(fields: Mapping[str, Any]) -> dict[str, Spread]:
    return {
        name: Spread(fields[f"{name}_mean"], fields[f"{name}_std"], fields[f"{name}_n"])
        for name in FIGURES
        if fields[f"{name}_n"]
    }


def _common(settings: Sequence[Setting]) -> Setting:
    """Return the overrides that all settings have."""
    return tuple(item for item in settings[0] if all(item in other for other in settings))


def _conditions(groups: Sequence[Group], common: Setting) -> list[dict[str, str]]:
    """Return the conditions in which any two groups differ, for each group."""
    platforms = [group[0].platform or Platform() for group in groups]
    versions = [platform.versions for platform in platforms]
    same_versions = _common([known for known in versions if known] or versions)
    by_title = {
        "setting": [_without(group[0].setting, common) for group in groups],
        "ranks": [str(platform.world_size or "unknown") for platform in platforms],
        "device": [platform.device or "unknown" for platform in platforms],
        "versions": [_without(v, same_versions) if v else "unknown" for v in versions],
    }
    differ = {title: texts for title, texts in by_title.items() if len(set(texts)) > 1}
    return [{title: differ[title][i] for title in differ} for i in range(len(groups))]


def _without(setting: Setting, common: Setting) -> str:
    return setting_text(tuple(item for item in setting if item not in common)) or "-"


def _with_platforms(runs: Sequence[Run]) -> list[Run]:
    """Give runs without a result the platform of those started with them, or else of all others.

    Where there are several platforms, or none, theirs stays unknown.
    """
    by_sweep: dict[object, set[Platform]] = {}
    for run in runs:
        if run.platform is not None:
            by_sweep.setdefault(run.sweep, set()).add(run.platform)
            by_sweep.setdefault("all", set()).add(run.platform)
    placed = []
    for run in runs:
        if run.platform is None:
            known = by_sweep.get(run.sweep) or by_sweep.get("all") or set()
            (platform,) = known if len(known) == 1 else (Platform(),)
            run = dataclasses.replace(run, platform=platform)
        placed.append(run)
    return placed


def _with_costs(runs: Sequence[Run]) -> list[Run]:
    """Give runs without a result the costs of the other runs of their sharder, if these agree."""
    by_sharder: dict[object, set[str | None]] = {}
    for run in runs:
        if run.result is not None:
            by_sharder.setdefault((run.sharder, run.options), set()).add(run.costs)
    filled = []
    for run in runs:
        known = by_sharder.get((run.sharder, run.options), set())
        if run.result is None and len(known) == 1:
            run = dataclasses.replace(run, costs=next(iter(known)))
        filled.append(run)
    return filled


def _by_number(text: str) -> tuple[object, ...]:
    """Return a sorting key that puts batch_size=256 before batch_size=1024."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", text)  # words at even places, then numbers
    return tuple(float(part) if i % 2 else part for i, part in enumerate(parts)), text
