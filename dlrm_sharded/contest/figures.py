"""Draws the ratios of a contest with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from dlrm_sharded.contest.score import Score

HEIGHT_OF_ROW, HEIGHT_OF_REST = 0.4, 1.3
"""Heights in inches: of a sharder's line, and of the axis with its title."""


def plot_scores(found: Sequence[Score], reference: str) -> Figure:
    """Draw a line for each sharder with its ratio to the reference, the cheapest one on top."""
    scores = sorted(found, key=lambda score: score.ratio.ratio if score.ratio else float("inf"))
    size = (7.0, HEIGHT_OF_REST + HEIGHT_OF_ROW * len(scores))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots()
    series = {
        "predicted": [score.ratio for score in scores],
        "measured": [score.measured for score in scores],
    }
    shown = {label: ratios for label, ratios in series.items() if any(ratios)}
    for number, (label, ratios) in enumerate(shown.items()):
        axes.plot([], [], "o", color=f"C{number}", ms=5, label=label)
        for row, ratio in enumerate(ratios):
            if ratio is None:
                continue
            place = row + 0.16 * (2 * number - len(shown) + 1)
            # an interval without a lower end is left out
            ends = [ratio.low, ratio.high] if ratio.low > 0 else [ratio.ratio] * 2
            axes.plot(ends, [place] * 2, color=f"C{number}", lw=2)
            axes.plot(ratio.ratio, place, "o", color=f"C{number}", ms=5)
            text, at = f"{ratio.ratio:.3f}", (max(ends), place)
            axes.annotate(text, at, (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.margins(x=0.1)  # for the numbers
    axes.axvline(1.0, color="gray", lw=0.8, ls=":", zorder=0)
    names = [f"{score} ({score.num_solved}/{score.plans.height})" for score in scores]
    axes.set_yticks(range(len(scores)), names, fontsize=9)
    axes.set_ylim(len(scores) - 0.5, -0.5)
    axes.set_xlabel(f"cost / {reference}, with 95 % intervals (plans found / tasks)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if len(shown) > 1:
        figure.legend(loc="outside upper right", ncols=2, fontsize=9, frameon=False)
    return figure
