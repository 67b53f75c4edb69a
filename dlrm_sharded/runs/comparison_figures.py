"""Draw a comparison, to be read where TensorBoard shows figures, about 330 pixels wide."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from dlrm_sharded.explain.figures import legend_above, plot_cost_by_rank, stack_bars, thumbnail
from dlrm_sharded.explain.text import STAGE_LABELS
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.runs.comparison import Comparison, Row
from dlrm_sharded.runs.run_tables import BASELINE

ROWS_OF_ONE_HEIGHT = 6
"""Number of rows from which on figures get higher."""

MAX_NAME = 36
MAX_CONDITIONS = 8
UNDIVIDED = "not divided"
"""Label of costs whose stages older runs did not write."""

ROOM_FOR_NUMBERS = 1.34
"""Length of an axis relative to the longest bar, which has its number at its end."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A figure that is shown as one bar for each row; `origin` is where bars begin."""

    figure: str
    title: str
    digits: int
    origin: float = 0.0


BARS = {
    "embedding_cost": Bars("embedding_cost_ms", "ms per step on the slowest rank", 2),
    "throughput": Bars("samples_per_s", "samples/s", 0),
    "imbalance": Bars("imbalance", "max / mean of the ranks' costs", 2, origin=1.0),
}


def comparison_figures(comparison: Comparison) -> dict[str, Figure]:
    """Draw figures by tag; figures of one kind have the same axes, to be compared by eye.

    Only the first MAX_CONDITIONS settings are drawn.
    """
    figures: dict[str, Figure] = {}
    grouped = _by_conditions(comparison)
    shown = [row for rows in grouped.values() for row in rows]
    for name, bars in BARS.items():
        end = _end(shown, bars)
        for conditions, rows in grouped.items():
            figures[_tag("comparison", name, *conditions)] = _plot(rows, bars, end)
    for conditions, rows in grouped.items():
        if any(row.standing is not None for row in rows):
            figures[_tag("comparison", "relative_throughput", *conditions)] = _plot_ratios(rows)
    figures |= _costs_by_rank(shown)
    return figures


def _by_conditions(comparison: Comparison) -> dict[tuple[str, ...], list[Row]]:
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in comparison.rows:
        grouped.setdefault(tuple(row.conditions.values()), []).append(row)
    return dict(itertools.islice(grouped.items(), MAX_CONDITIONS))


def _tag(*names: str) -> str:
    """Join names to a tag; TensorBoard groups by the part before the first slash."""
    return "/".join(name.replace("/", "_") for name in names)


def _costs_by_rank(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw the first run of each row that has the costs of its ranks."""
    costs: dict[tuple[str, ...], tuple[str, PlanCost]] = {}
    for row in rows:
        for run in row.runs:
            if run.result is not None and run.result.cost is not None:
                costs[row.sharder, *row.conditions.values()] = run.name, run.result.cost
                break
    if not costs:
        return {}
    max_ms = 1.05 * max(cost.cost_ms for _, cost in costs.values())
    num_ranks = max(len(cost.per_rank) for _, cost in costs.values())
    return {
        _tag("cost_by_rank", *names): plot_cost_by_rank(
            cost, max_ms=max_ms, num_ranks=num_ranks, label=f"ms per step of {_cut(run)}"
        )
        for names, (run, cost) in costs.items()
    }


def _end(rows: Sequence[Row], bars: Bars) -> float:
    known = [row.figures[bars.figure] for row in rows if bars.figure in row.figures]
    most = max((spread.mean + (spread.std or 0) for spread in known), default=bars.origin)
    return bars.origin + ROOM_FOR_NUMBERS * ((most - bars.origin) or 1.0)


def _plot(rows: Sequence[Row], bars: Bars, end: float) -> Figure:
    figure, axes = thumbnail(2.9 + 0.3 * max(0, len(rows) - ROWS_OF_ONE_HEIGHT))
    spreads = [row.figures.get(bars.figure) for row in rows]
    means = [spread.mean if spread else bars.origin for spread in spreads]
    if bars.figure == "embedding_cost_ms":
        stages = _stages(rows)
        stack_bars(axes, range(len(rows)), (*STAGE_LABELS, UNDIVIDED)[: len(stages)], stages)
        legend_above(figure, columns=4)
    else:
        axes.barh(range(len(rows)), [mean - bars.origin for mean in means], left=bars.origin)
    for place, (row, spread) in enumerate(zip(rows, spreads, strict=True)):
        if spread is None:
            text, x = _missing(row), bars.origin
        else:
            std = spread.std or 0.0
            if spread.std is not None:
                axes.errorbar(spread.mean, place, xerr=std, color="black", capsize=2, lw=1)
            text, x = f"{spread.mean:,.{bars.digits}f}", spread.mean + std
        axes.annotate(text, (x, place), (3, 0), textcoords="offset points", va="center", fontsize=9)
    baselines = [row.figures.get(bars.figure) for row in rows if row.sharder == BASELINE]
    for baseline in filter(None, baselines):
        axes.axvline(baseline.mean, color="gray", lw=0.8, ls=":", zorder=0)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(bars.origin, end)
    title = f"{bars.title} (dotted: {BASELINE})" if any(baselines) else bars.title
    figure.supxlabel(title, fontsize=10)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _plot_ratios(rows: Sequence[Row]) -> Figure:
    """Draw each row's throughput over that of the fastest, with its interval; ties are hollow."""
    figure, axes = thumbnail(2.9 + 0.3 * max(0, len(rows) - ROWS_OF_ONE_HEIGHT))
    axes.axvline(1.0, color="gray", lw=0.8, ls=":", zorder=0)
    for place, row in enumerate(rows):
        if row.standing is None:
            axes.annotate(_missing(row), (1.0, place), ha="right", va="center", fontsize=9)
            continue
        behind = row.standing.behind
        ratio = 1.0 if behind is None else 1 / behind.ratio
        if behind is not None and behind.low > 0:
            axes.plot([1 / behind.high, 1 / behind.low], [place] * 2, color="black", lw=1)
        is_tie = behind is not None and behind.is_tie
        axes.plot(ratio, place, "o", color="C0", mfc="white" if is_tie else "C0", zorder=3)
        text = f"{ratio:.3f}{', tie' if is_tie else ''}"
        axes.annotate(text, (ratio, place), (0, 5), textcoords="offset points", ha="center", size=8)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.15)
    figure.supxlabel("throughput / the fastest's, with 95 % intervals", fontsize=10)
    return figure


def _stages(rows: Sequence[Row]) -> list[list[float]]:
    """Return the mean stages of each run's slowest rank, then what older runs do not divide up.

    They sum to the mean embedding cost.
    """
    parts = [[0.0] * len(rows) for _ in (*STAGES, UNDIVIDED)]
    for place, row in enumerate(rows):
        if (cost := row.figures.get("embedding_cost_ms")) is None:
            continue
        for part, stage in zip(parts, STAGES, strict=False):
            if spread := row.figures.get(f"slowest_rank_{stage}_ms"):
                part[place] = spread.mean * spread.n / cost.n
        rest = cost.mean - sum(part[place] for part in parts)
        parts[-1][place] = rest if rest > 1e-6 * cost.mean else 0.0
    return parts if any(parts[-1]) else parts[:-1]


def _missing(row: Row) -> str:
    return "unknown" if row.results else f"0 of {len(row.runs)} succeeded"


def _name(row: Row) -> str:
    name = _cut(row.sharder)
    failed = len(row.runs) - len(row.results)
    return f"{name} ({len(row.results)}/{len(row.runs)})" if failed and row.results else name


def _cut(name: str) -> str:
    """Cut the middle of a name that is too long to show."""
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[: half - 1]}…{name[1 - half :]}"
