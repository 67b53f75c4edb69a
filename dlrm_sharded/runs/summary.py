"""Runs in order, and in rows: together those whose figures may be averaged."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from dlrm_sharded.runs.frames import BASELINE, FIGURES, run_table, summary_table
from dlrm_sharded.runs.run import Run
from dlrm_sharded.runs.schema import Platform, Result, Setting, written

SHARDERS = (
    BASELINE,
    "size",
    "dim",
    "lookup",
    "size_lookup",
    "torchrec_blind",
    "torchrec",
    "autoshard",
    "dreamshard",
    "neuroshard_paper",
    "neuroshard",
)
"""Order of the papers' tables; others follow by name."""


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
        conditions: by title, those that tell this row from others of the same sharder.
        figures: spreads of those of FIGURES that are known of any run.
    """

    sharder: str
    conditions: Mapping[str, str]
    runs: tuple[Run, ...]
    figures: Mapping[str, Spread]

    @property
    def results(self) -> list[Result]:
        """Of the runs that succeeded."""
        return [run.result for run in self.runs if run.result is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a set of runs came to.

    Args:
        table: one row a run; figures are null for runs that did not succeed.
        summary: one row a GROUP: counts, then mean, std and n of FIGURES.
        rows: those of the summary, for showing.
        common: overrides of all runs.
        problems: what could not be read.
    """

    table: pl.DataFrame
    summary: pl.DataFrame
    rows: tuple[Row, ...]
    common: Setting
    problems: tuple[str, ...]

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]


def summarize(runs: Sequence[Run], problems: Sequence[str] = ()) -> Comparison:
    """Group runs, pair them with the random ones, and average."""
    ordered = sorted(_with_platforms(runs), key=_order)
    table = run_table(ordered)
    summary = summary_table(table)
    groups = [tuple(group) for _, group in itertools.groupby(ordered, key=_group)]
    common = _common([run.setting for run in ordered])
    rows = tuple(
        Row(
            sharder=group[0].sharder + (f" ({fields['options']})" if fields["options"] else ""),
            conditions=conditions,
            runs=group,
            figures=_figures(fields),
        )
        for group, conditions, fields in zip(
            groups, _conditions(groups, common), summary.iter_rows(named=True), strict=True
        )
    )
    return Comparison(
        table=table, summary=summary, rows=rows, common=common, problems=tuple(problems)
    )


def _group(run: Run) -> tuple[object, ...]:
    return run.sharder, run.options, run.setting, run.platform


def _figures(fields: Mapping[str, Any]) -> dict[str, Spread]:
    return {
        name: Spread(fields[f"{name}_mean"], fields[f"{name}_std"], fields[f"{name}_n"])
        for name in FIGURES
        if fields[f"{name}_n"]
    }


def _common(settings: Sequence[Setting]) -> Setting:
    """What is in all of them."""
    return tuple(item for item in settings[0] if all(item in other for other in settings))


def _conditions(groups: Sequence[tuple[Run, ...]], common: Setting) -> list[dict[str, str]]:
    """Of each group, the conditions in which any two differ."""
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
    return written(tuple(item for item in setting if item not in common)) or "-"


def _with_platforms(runs: Sequence[Run]) -> list[Run]:
    """Runs without a result, on the platform of those started with them, or else of all others.

    Where those are several, or none, it stays unknown.
    """
    of_sweep: dict[object, set[Platform]] = {}
    for run in runs:
        if run.platform is not None:
            of_sweep.setdefault(run.sweep, set()).add(run.platform)
            of_sweep.setdefault("all", set()).add(run.platform)
    placed = []
    for run in runs:
        if run.platform is None:
            known = of_sweep.get(run.sweep) or of_sweep.get("all") or set()
            (platform,) = known if len(known) == 1 else (Platform(),)
            run = dataclasses.replace(run, platform=platform)
        placed.append(run)
    return placed


def _order(run: Run) -> tuple[object, ...]:
    platform = run.platform or Platform()
    known = run.sharder in SHARDERS
    return (
        _by_number(written(run.setting)),
        (platform.world_size or -1, platform.device or "", platform.versions),
        (SHARDERS.index(run.sharder) if known else len(SHARDERS), run.sharder),
        _by_number(written(run.options)),
        -1 if run.seed is None else run.seed,
        run.name,
    )


def _by_number(text: str) -> tuple[object, ...]:
    """Key that puts batch_size=256 before batch_size=1024."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", text)  # words at even places, then numbers
    return tuple(float(part) if i % 2 else part for i, part in enumerate(parts)), text
