"""Pictures of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from full_benchmark.analysis import PREDICTED_TIE, compare, figures, sharders_of
from full_benchmark.claims import Rows
from studies.study import Row

REFERENCE = "neuroshard"


def pictures(rows: Rows) -> dict[str, Figure]:
    """Return the pictures by name; those without rows are left out."""
    drawn = {}
    if rows.get("scaling"):
        drawn["scaling"] = plot_scaling(rows["scaling"])
    if rows.get("measured"):
        drawn["measured"] = plot_ratios(
            rows["measured"], "cost_ms", "embedding cost over neuroshard's, computation measured"
        )
    if rows.get("production"):
        drawn["production"] = plot_ratios(
            rows["production"], "cost_ms", "embedding cost over neuroshard's, predicted"
        )
    return drawn


def plot_scaling(rows: Sequence[Row]) -> Figure:
    """Draw the time to plan over the numbers of tables and of ranks, on log-log scales."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    sharders = sharders_of(rows)
    for axes, (axis, key) in zip(
        figure.subplots(1, 2, sharey=True),
        (("tables", "num_tables"), ("ranks", "world_size")),
        strict=True,
    ):
        of_axis = [row for row in rows if row["axis"] == axis]
        for i, sharder in enumerate(sharders):
            points = sorted(
                (row[key], row["solve_s"])
                for row in of_axis
                if row["sharder"] == sharder and row["cost_ms"]
            )
            if points:
                axes.loglog(*zip(*points, strict=True), "o-", color=f"C{i}", label=sharder)
        axes.set_xlabel(f"number of {axis}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("seconds to plan")
    figure.axes[0].legend(frameon=False)
    return figure


def plot_ratios(rows: Sequence[Row], key: str, label: str) -> Figure:
    """Draw the mean ratio of every sharder's figure to the reference's as bars."""
    found = figures(rows, key)
    ratios = {
        sharder: compare(found, sharder, REFERENCE, margin=PREDICTED_TIE).ratio
        for sharder in sharders_of(rows)
        if found[sharder]
    }
    ordered = sorted(ratios, key=lambda sharder: -ratios[sharder])
    figure = Figure(figsize=(7, 0.32 * len(ordered) + 1), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(ordered, [ratios[sharder] for sharder in ordered], color="#4c78a8")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    return figure
