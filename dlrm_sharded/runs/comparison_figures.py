"""Draws a comparison, and writes it as a separate run in TensorBoard.

Figures are designed for TensorBoard, which shows them about 330 pixels wide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dlrm_sharded.explain.figures import legend_above, stack_bars, thumbnail
from dlrm_sharded.explain.text import STAGE_TITLES
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.runs.comparison import BASELINE, Comparison, Row
from dlrm_sharded.runs.comparison_text import comparison_markdown
from dlrm_sharded.runs.ranking import PairedRatio
from dlrm_sharded.runs.run_events import EventFile

EVENT_FILE_SUFFIX = ".comparison"
WRITTEN = f"events.out.tfevents.*{EVENT_FILE_SUFFIX}", "comparison.*.png"
"""Patterns of the files that a later comparison replaces."""

MAX_FILE_NAME = 100
"""Largest length of a plot's file name; longer ones are cut."""

ROWS_OF_ONE_HEIGHT = 6
"""Largest number of rows in a figure of normal height."""

MARKERS = "osD^v<>phX"
FASTEST = PairedRatio(1.0, 1.0, 1.0, 0)
"""The ratio of the fastest row to itself."""

MAX_NAME = 36
MAX_CONDITIONS = 8
AXIS_LENGTH = 1.34
"""Length of an axis relative to the longest bar, which has its number at its end."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A figure shown as one bar for each row; bars begin at `origin`."""

    figure: str
    title: str
    digits: int
    origin: float = 0.0


BARS = {
    "embedding_cost": Bars("embedding_cost_ms", "ms per step on the slowest rank", 2),
    "throughput": Bars("samples_per_s", "samples/s", 0),
    "imbalance": Bars("imbalance", "max / mean of the ranks' costs", 2, origin=1.0),
}


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Write the event file and plots of a comparison in place of earlier ones."""
    for old in itertools.chain.from_iterable(map(folder.glob, WRITTEN)):
        old.unlink()
    with EventFile(folder, suffix=EVENT_FILE_SUFFIX) as file:
        file.text("comparison/summary", comparison_markdown(comparison))
        for number, (tag, figure) in enumerate(comparison_figures(comparison).items()):
            file.figure(tag, figure)
            name = tag.replace("/", ".")
            name = name if len(name) <= MAX_FILE_NAME else f"{name[:MAX_FILE_NAME]}….{number}"
            figure.savefig(folder / f"{name}.png", dpi=150)


def comparison_figures(comparison: Comparison) -> dict[str, Figure]:
    """Return figures by tag; figures of one kind have the same axes, to be compared by eye.

    Only the first MAX_CONDITIONS settings are drawn.
    """
    by_conditions = itertools.groupby(comparison.rows, lambda row: tuple(row.conditions.values()))
    grouped = {key: list(rows) for key, rows in itertools.islice(by_conditions, MAX_CONDITIONS)}
    shown = [row for rows in grouped.values() for row in rows]
    figures = {}
    for name, bars in BARS.items():
        end = _end(shown, bars)
        for conditions, rows in grouped.items():
            figures[_tag("comparison", name, *conditions)] = _plot(rows, bars, end)
    for conditions, rows in grouped.items():
        if any(row.ratios["time_over_fastest"] for row in rows):
            ratios = {"": [_over_fastest(row)[1] for row in rows]}
            figures[_tag("comparison", "relative_throughput", *conditions)] = plot_ratios(
                [_name(row) for row in rows], ratios, "throughput / the fastest's, 95 % intervals"
            )
            figures[_tag("comparison", "cost_and_throughput", *conditions)] = _plot_relation(rows)
    return figures


def plot_ratios(
    names: Sequence[str], series: Mapping[str, Sequence[PairedRatio | None]], label: str
) -> Figure:
    """Draw ratios with their intervals; markers of ties are hollow.

    Args:
        names: names of the rows, from top to bottom.
        series: by title in the legend, the ratios of all rows; None for an unknown one.
    """
    figure, axes = _rows_of(names, label)
    axes.axvline(1.0, color="gray", lw=0.8, ls=":", zorder=0)
    for number, (title, ratios) in enumerate(series.items()):
        style = f"oC{number}"
        axes.plot([], [], style, label=title)
        for row, ratio in enumerate(ratios):
            if ratio is None:
                continue
            place = row + 0.16 * (2 * number - len(series) + 1)
            axes.errorbar(
                ratio.ratio, place, xerr=_error_bar(ratio), fmt=style, mfc=_fill_color(ratio)
            )
            text, at = f"{ratio.ratio:.3f}", (ratio.ratio, place)
            axes.annotate(text, at, (0, 5), textcoords="offset points", ha="center", size=8)
    axes.margins(x=0.15)  # for the numbers
    if len(series) > 1:
        legend_above(figure, columns=len(series))
    return figure


def _plot_relation(rows: Sequence[Row]) -> Figure:
    """Draw the throughput of each row over its embedding cost, both relative to the fastest's.

    Rows that tie with the fastest are hollow. Rows lie on the dotted curve if the step time grows
    by the same factor as the embedding cost.
    """
    figure, axes = thumbnail(4.2)
    for row, marker in zip(rows, itertools.cycle(MARKERS), strict=False):
        cost, speed = _over_fastest(row)
        if cost is not None and speed is not None:
            bars = _error_bar(speed), _error_bar(cost)
            axes.errorbar(
                cost.ratio, speed.ratio, *bars, marker, mfc=_fill_color(speed), label=_name(row)
            )
    costs = np.linspace(*axes.get_xlim())
    axes.plot(costs, 1 / costs, color="gray", lw=0.8, ls=":", zorder=0)
    axes.set_xlabel("embedding cost / the fastest's, 95 % intervals")
    axes.set_ylabel("throughput / the fastest's")
    legend_above(figure, columns=2)
    return figure


def _error_bar(ratio: PairedRatio) -> list[list[float]] | None:
    """Return how far the interval extends to both sides; None if there is no interval."""
    if math.isinf(ratio.high):
        return None
    return [[ratio.ratio - ratio.low], [ratio.high - ratio.ratio]]


def _fill_color(ratio: PairedRatio) -> str | None:
    """Return the fill color of a ratio's marker: white for a tie; None for the default."""
    return "white" if ratio.is_tie and ratio.low < ratio.high else None


def _over_fastest(row: Row) -> tuple[PairedRatio | None, PairedRatio | None]:
    """Return embedding cost and throughput relative to the fastest row's; None where unknown."""
    behind = row.ratios["time_over_fastest"]
    if behind is None:
        return (FASTEST, FASTEST) if row.is_reference("time_over_fastest") else (None, None)
    high = 1 / behind.low if behind.low else math.inf
    speed = PairedRatio(1 / behind.ratio, 1 / behind.high, high, behind.num_pairs)
    return row.ratios["cost_over_fastest"], speed


def _tag(*names: str) -> str:
    """Join names into a tag; TensorBoard groups by the part before the first slash."""
    return "/".join(name.replace("/", "_") for name in names)


def _end(rows: Sequence[Row], bars: Bars) -> float:
    spreads = [row.spread(bars.figure) for row in rows]
    most = max((mean + std for mean, std, num in spreads if num), default=bars.origin)
    return bars.origin + AXIS_LENGTH * ((most - bars.origin) or 1.0)


def _plot(rows: Sequence[Row], bars: Bars, end: float) -> Figure:
    """Draw a bar for each row; a cost of rounds is divided into stages as in the training."""
    figure, axes = _rows_of([_name(row) for row in rows], bars.title)
    spreads = [row.spread(bars.figure) for row in rows]
    if bars.figure == "embedding_cost_ms":
        names = [f"slowest_rank_{stage}_ms" for stage in STAGES]
        stages = np.array([[row.spread(name)[0] for row in rows] for name in names])
        scale = [mean for mean, _, _ in spreads] / np.maximum(stages.sum(axis=0), 1e-9)
        stack_bars(axes, range(len(rows)), STAGE_TITLES, [*(stages * scale)])
        legend_above(figure, columns=4)
    else:
        widths = [mean - bars.origin if num else 0.0 for mean, _, num in spreads]
        axes.barh(range(len(rows)), widths, left=bars.origin)
    for place, (row, (mean, std, num)) in enumerate(zip(rows, spreads, strict=True)):
        text, x = (f"{mean:,.{bars.digits}f}", mean + std) if num else ("unknown", bars.origin)
        if std:
            axes.errorbar(mean, place, xerr=std, color="black", capsize=2, lw=1)
        if num and row.label == BASELINE:
            axes.axvline(mean, color="gray", lw=0.8, ls=":", zorder=0)
            figure.supxlabel(f"{bars.title} (dotted: {BASELINE})", fontsize=10)
        axes.annotate(text, (x, place), (3, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_xlim(bars.origin, end)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _rows_of(names: Sequence[str], label: str) -> tuple[Figure, Axes]:
    """Return an empty figure with a row for each name, from top to bottom."""
    figure, axes = thumbnail(2.9 + 0.3 * max(0, len(names) - ROWS_OF_ONE_HEIGHT))
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    figure.supxlabel(label, fontsize=10)
    return figure, axes


def _name(row: Row) -> str:
    """Return the name of a row, without its middle if it is too long to show."""
    name, num, num_all = row.label, row.fields["succeeded"], row.fields["runs"]
    if len(name) > MAX_NAME:
        name = f"{name[: MAX_NAME // 2 - 1]}…{name[1 - MAX_NAME // 2 :]}"
    return f"{name} ({num}/{num_all})" if num < num_all else name
