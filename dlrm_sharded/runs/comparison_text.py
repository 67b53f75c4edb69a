"""Writes a comparison as Markdown for files and TensorBoard, and as a short table for terminals."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.runs.comparison import Comparison, Row
from dlrm_sharded.runs.paired import PairedRatio
from dlrm_sharded.runs.ranking import Standing, ratio_text
from dlrm_sharded.runs.result import Platform, RunResult, setting_text
from dlrm_sharded.runs.run_tables import PREDICTION_ERROR

MAX_LINE = 400
"""Largest number of characters of a line in the terminal."""

MAX_SEEDS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureColumn:
    """Describes how the means of a figure over runs are shown.

    Args:
        digits: number of decimals; None for two significant digits, at most five decimals.
        scale: factor between the figure and the number that is shown.
        sign: whether positive means have a plus sign.
    """

    title: str
    figure: str
    digits: int | None = 2
    scale: float = 1.0
    sign: bool = False


COST = FigureColumn(title="embedding cost, ms", figure="embedding_cost_ms")
IMBALANCE = FigureColumn(title="imbalance", figure="imbalance")
PLANNING = FigureColumn(title="planning, s", figure="plan_solve_s", digits=None)
THROUGHPUT_COLUMN = FigureColumn(title="samples/s", figure="samples_per_s", digits=0)
GAP = FigureColumn(title="gap, %", figure="gap", digits=1, scale=100)
PREDICTION = FigureColumn(
    title="prediction, %", figure=PREDICTION_ERROR, digits=1, scale=100, sign=True
)
RATIOS: Mapping[str, Callable[[Standing], PairedRatio | None]] = {
    "x random (95 %)": lambda standing: standing.gain,
    "fastest x (95 %)": lambda standing: standing.behind,
}
"""Columns of ratios of throughput by title."""

STAGE_COLUMNS = (
    FigureColumn(title="critical path, ms", figure="critical_path_ms"),
    *(FigureColumn(title=stage.replace("_", " "), figure=f"{stage}_ms") for stage in STAGES),
    FigureColumn(title="input dist", figure="input_dist_ms"),
)

ABOUT_MEANS = """\
Figures are means over the runs that succeeded, ± their standard deviation (n - 1) if there are
several. The random rows come first, then the others from the slowest to the fastest. "x random" is
the throughput over that of random, and "fastest x" that of the fastest over that of the row, both
with 95 % intervals."""
ABOUT_ROUNDS = """\
Ratios are from pairs of runs with the same seed, measured in the same round, in which all runs were
measured beside one another. No distribution is assumed; runs with the same plan count as one."""
ABOUT_SEEDS = """\
Ratios are from pairs of runs with the same seed, which were trained one after another or on other
hosts. No distribution is assumed; runs with the same plan count as one."""
ABOUT_GAP = """\
Gap is an upper limit, in percent, on how far the plan's predicted embedding cost is above the
lowest possible one."""
ABOUT_STAGES = """\
Times are in ms; those of stages are maxima over the ranks. The critical path is the sum of the
stages; input dist, the redistribution of the ids, comes before them. The embedding cost is their
sum on the slowest rank."""
ABOUT_PREDICTION = (
    "Prediction: predicted - measured embedding cost, in percent of the measured one."
)


def comparison_markdown(comparison: Comparison) -> str:
    """Write the conditions, the figures and the failures of a comparison.

    There are two tables of few columns, as TensorBoard breaks words to fit a wide one.
    """
    columns, about_means = [COST, IMBALANCE, PLANNING, THROUGHPUT_COLUMN], ABOUT_MEANS
    predicts = comparison.has_one_set_of_prices
    if predicts and any(GAP.figure in row.figures for row in comparison.rows):
        columns.insert(columns.index(PLANNING), GAP)
        about_means = f"{ABOUT_MEANS} {ABOUT_GAP}"
    stage_columns, about_stages = STAGE_COLUMNS, ABOUT_STAGES
    if predicts and any(PREDICTION_ERROR in row.figures for row in comparison.rows):
        stage_columns = (*STAGE_COLUMNS, PREDICTION)
        about_stages = f"{ABOUT_STAGES} {ABOUT_PREDICTION}"
    lines = [
        *(f"- {_escaped(line)}" for line in _about(comparison)),
        "",
        _table(comparison, columns, ratios=RATIOS, escaped=True).markdown(),
        "",
        about_means,
    ]
    if ranking := _ranking_lines(comparison):
        has_rounds = all(found.has_rounds for _, found in comparison.rankings)
        about_ratios = ABOUT_ROUNDS if has_rounds else ABOUT_SEEDS
        lines += ["", about_ratios, "", *(f"- {_escaped(line)}" for line in ranking)]
    if failures := _failures(comparison):
        lines += ["", "In no mean, as they did not succeed:", ""]
        lines += [f"- {_escaped(line)}" for line in failures]
    stages = _table(comparison, stage_columns, escaped=True).markdown()
    lines += ["", stages, "", about_stages]
    return "\n".join(lines) + "\n"


def short_table(comparison: Comparison) -> str:
    """Return the main figures and every failure, for a terminal."""
    table = _table(comparison, [COST, IMBALANCE, THROUGHPUT_COLUMN], ratios=RATIOS)
    failures = [_shortened(line) for line in _failures(comparison)]
    return "\n".join([table.text(), *failures, *_ranking_lines(comparison)])


def _ranking_lines(comparison: Comparison) -> list[str]:
    """Return who is how far ahead, and last what a person can do."""
    lines = []
    for setting, ranking in comparison.rankings:
        which = f"{setting_text(setting)}: " if len(comparison.rankings) > 1 else ""
        lines += [f"{which}{line}" for line in ranking.lines()]
    return lines


def _table(
    comparison: Comparison,
    columns: Sequence[FigureColumn],
    *,
    ratios: Mapping[str, Callable[[Standing], PairedRatio | None]] | None = None,
    escaped: bool = False,
) -> TextTable:
    """Return a table with a row for each sharder and setting.

    Args:
        ratios: further columns of ratios by title; those that no row has are left out.
        escaped: whether its texts are written so that Markdown shows them as they stand.
    """
    conditions = list(comparison.rows[0].conditions)
    shown = {
        title: cells
        for title, of_standing in (ratios or {}).items()
        if any(cells := [_ratio_cell(row.standing, of_standing) for row in comparison.rows])
    }
    numbers = [*(column.title for column in columns), *shown, "runs"]
    rows = [
        [
            row.sharder,
            *row.conditions.values(),
            *(_cell(row, column) for column in columns),
            *(cells[place] for cells in shown.values()),
            f"{len(row.results)} / {len(row.runs)}",
        ]
        for place, row in enumerate(comparison.rows)
    ]
    if escaped:
        rows = [[cell and _escaped(cell) for cell in row] for row in rows]
    return TextTable(
        ["sharder", *conditions, *(Column(title, align=">") for title in numbers)], rows
    )


def _cell(row: Row, column: FigureColumn) -> str | None:
    figure = row.figures.get(column.figure)
    if figure is None:
        return None
    mean = figure.mean * column.scale
    digits = _digits(mean) if column.digits is None else column.digits
    text = f"{mean:{'+' if column.sign else ''},.{digits}f}"
    if figure.std is not None:
        text += f" ± {figure.std * column.scale:,.{digits}f}"
    if figure.n < len(row.results):
        text += f" ({figure.n} of {len(row.results)})"
    return text


def _ratio_cell(
    standing: Standing | None, of_standing: Callable[[Standing], PairedRatio | None]
) -> str | None:
    ratio = None if standing is None else of_standing(standing)
    if ratio is None:
        return None
    text, interval = ratio_text(ratio)
    if math.isinf(ratio.high):
        return f"{text} ({interval.partition(',')[0]})"
    return f"{text} ({interval}{', tie' if ratio.is_tie else ''})"


def _digits(value: float) -> int:
    return 1 if value == 0 else min(5, max(1, 1 - math.floor(math.log10(abs(value)))))


def _about(comparison: Comparison) -> Iterator[str]:
    """Describe the compared runs, and count them by kind if they differ."""
    runs = comparison.runs
    results = [result for row in comparison.rows for result in row.results]
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    yield f"{len(runs)} runs, {len(results)} succeeded; {len(seeds)} seeds{_listed(seeds)}"
    platforms = [run.platform or Platform() for run in runs]
    yield "hardware: " + _counted(
        f"{platform.world_size or 'unknown'} ranks, {platform.device or 'unknown'}"
        for platform in platforms
    )
    yield "versions: " + _counted(
        ", ".join(f"{name} {text}" for name, text in platform.versions) or "unknown"
        for platform in platforms
    )
    if not all(ranking.has_rounds for _, ranking in comparison.rankings):
        yield from _surroundings(results)
    commits = [result.commit or "unknown" for result in results]
    note = "; rows do not tell commits apart" if len(set(commits)) > 1 else ""
    yield f"commit: {_counted(commit[:12] for commit in commits)}{note}"
    if not comparison.has_one_set_of_prices:
        yield (
            "prices: not the same in all; predictions and bounds are left out, as they differ by "
            "the prices, too"
        )
    yield "batch size: " + _counted(f"{result.batch_size or 'unknown'}" for result in results)
    if comparison.common:
        yield f"the same in all: {setting_text(comparison.common)}"
    if differing := list(comparison.rows[0].conditions):
        yield f"runs that differ in {', '.join(differing)} have rows of their own"


def _surroundings(results: Sequence[RunResult]) -> Iterator[str]:
    """Say what was not equal of the surroundings of runs that were measured apart."""
    known = [result for result in results if result.hosts and result.began_s]
    if len(known) < 2:
        return
    loads = [load for result in known for load in (result.hosts or {}).values()]
    began_s = [result.began_s or 0.0 for result in known]
    waits = [result.core_wait or 0.0 for result in known]
    hosts = _counted(", ".join(sorted(result.hosts or {})) for result in known)
    yield (
        f"not measured side by side: on {hosts}; began within "
        f"{(max(began_s) - min(began_s)) / 60:.0f} minutes, at a load of {min(loads):.1f} to "
        f"{max(loads):.1f}; others had the cores for {100 * min(waits):.0f} to "
        f"{100 * max(waits):.0f} % of a training"
    )


def _listed(seeds: Sequence[int]) -> str:
    shown = ", ".join(map(str, seeds[:MAX_SEEDS_SHOWN]))
    return f" ({shown}{', ...' if len(seeds) > MAX_SEEDS_SHOWN else ''})" if seeds else ""


def _counted(texts: Iterable[str]) -> str:
    counts = Counter(texts)
    if len(counts) < 2:
        return next(iter(counts), "unknown")
    return "; ".join(f"{text} ({count} runs)" for text, count in counts.items())


def _failures(comparison: Comparison) -> list[str]:
    """Return a line for each run that did not succeed and each thing that could not be read."""
    lines = []
    for run in comparison.runs:
        if not run.succeeded:
            log = "no log" if run.log is None else f"log: {run.log}"
            lines.append(f"{run.name}: {run.state}: {run.reason or 'no reason known'} ({log})")
    return [" ".join(line.split()) for line in [*lines, *comparison.problems]]


def _shortened(line: str) -> str:
    """Cut the middle of a long line; the log's name at its end stays."""
    if len(line) <= MAX_LINE:
        return line
    half = MAX_LINE // 2
    return f"{line[: half - 3]} ... {line[2 - half :]}"


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it stands."""
    escaped = re.sub(r"([\\|`*\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;")
