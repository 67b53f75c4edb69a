"""Draws the timeline of all ranks: what each does, and when it waits."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections import defaultdict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from dlrm_sharded.simulation.run import SimulatedRun
from dlrm_sharded.step.parts import OTHER, PART_LABELS, PARTS, WAITING
from dlrm_sharded.step.timeline import COMPUTE, EXCHANGE, Timeline
from dlrm_sharded.tracing.perfetto import Span, timeline_spans

_COLORS = (
    *("#8c8c8c", "#a6cee3", "#1f78b4", "#fdbf6f", "#b2df8a", "#33a02c"),
    *("#ff7f00", "#6a3d9a", "#b15928", "#fb9a99", "#e31a1c", "#cab2d6"),
)
COLORS = dict(zip(PARTS, itertools.cycle(_COLORS), strict=False))
COLORS |= {WAITING: "#ededed", OTHER: "#ffffff"}
"""Colours of the parts of a step; waiting is light, so that it looks empty."""

MAX_BARS = 32
"""Largest number of ranks whose operations are drawn as bars; more ranks are strips of pixels."""

PIXELS = 1600
"""Moments of a strip."""

COMPUTE_LANE, EXCHANGE_LANE = (-0.45, 0.55), (0.12, 0.3)
"""Place and height of the lanes of a rank whose exchanges run beside its computation."""

SHOWN_STEPS = 4
"""Steps in which the operations of the shown window are."""


def plot_timeline(run: SimulatedRun, heading: str) -> Figure:
    """Draw one step of all ranks, or two steps if they overlap, and how long each rank waits."""
    overlaps = EXCHANGE in {op.stream for op in run.timeline.operations}
    # the first step is left out, which begins with nothing under way
    begin, end = (float(run.timeline.step_ends_ms[step]) for step in (0, 2 if overlaps else 1))
    length_ms = end - begin
    world_size = run.timeline.world_size
    height = 3.2 + 0.24 * min(world_size, MAX_BARS)
    figure = Figure(figsize=(12, height), dpi=130, layout="constrained")
    axes, waits = figure.subplots(1, 2, width_ratios=(6, 1), sharey=True)
    spans = _shown_spans(run.timeline, begin, end)
    if world_size <= MAX_BARS:
        _draw_bars(axes, spans, overlaps=overlaps)
    else:
        _draw_strips(axes, spans, length_ms, world_size)
    _finish_axes(axes, run, length_ms)
    _draw_waits(waits, run)
    shown = {span.part for span in spans}
    figure.legend(
        handles=[
            Patch(
                facecolor=COLORS[part], edgecolor="#999999", linewidth=0.5, label=PART_LABELS[part]
            )
            for part in PARTS
            if part in shown
        ],
        loc="outside lower center",
        ncols=6,
        fontsize=8,
        frameon=False,
    )
    step = run.step
    title = (
        f"{run.planned.sharder}: step {step.step_ms:.1f} ms, {step.samples_per_s:,.0f} samples/s"
    )
    figure.suptitle("\n".join([title, *textwrap.wrap(heading, 150)]), fontsize=9)
    return figure


def _shown_spans(timeline: Timeline, begin: float, end: float) -> list[Span]:
    """Return what ranks do in a window, in ms since it began; reading batches is left out."""
    # a step that overlaps with the next one is still under way after the window's last step
    return [
        dataclasses.replace(span, begin_ms=span.begin_ms - begin, end_ms=span.end_ms - begin)
        for span in timeline_spans(timeline, num_steps=SHOWN_STEPS)
        if span.stream in (COMPUTE, EXCHANGE) and span.end_ms > begin and span.begin_ms < end
    ]


def _draw_bars(axes: Axes, spans: list[Span], *, overlaps: bool) -> None:
    """Draw every operation as a bar; a rank's exchanges are below its computation."""
    bars: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        key = (span.rank, span.stream, span.part)
        bars[key].append((span.begin_ms, span.end_ms - span.begin_ms))
    for (rank, stream, part), extents in bars.items():
        low, height = (-0.4, 0.8)
        if overlaps:
            low, height = EXCHANGE_LANE if stream == EXCHANGE else COMPUTE_LANE
        axes.broken_barh(
            extents, (rank + low, height), facecolors=COLORS[part], edgecolor="white", linewidth=0.2
        )


def _draw_strips(axes: Axes, spans: list[Span], length_ms: float, world_size: int) -> None:
    """Draw what every rank does as a row of pixels: its computation, or else its exchange."""
    axes.imshow(
        strips(spans, length_ms, world_size),
        cmap=ListedColormap([COLORS[part] for part in PARTS]),
        vmin=-0.5,
        vmax=len(PARTS) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, length_ms, world_size - 0.5, -0.5),
    )


def strips(spans: list[Span], length_ms: float, world_size: int) -> NDArray[np.int8]:
    """Return [W, PIXELS], the place in `PARTS` of what each rank does at each moment."""
    pixels_per_ms = PIXELS / length_ms
    picture = np.full((world_size, PIXELS), PARTS.index("other"), dtype=np.int8)
    for stream in (EXCHANGE, COMPUTE):  # computation covers the exchanges beside it
        for span in spans:
            if span.stream != stream:
                continue
            begin, end = (
                round(moment * pixels_per_ms)
                for moment in (max(span.begin_ms, 0.0), min(span.end_ms, length_ms))
            )
            picture[span.rank, begin : max(end, begin + 1)] = PARTS.index(span.part)
    return picture


def _finish_axes(axes: Axes, run: SimulatedRun, length_ms: float) -> None:
    world_size = run.timeline.world_size
    per_host = run.task.topology.ranks_per_host
    num_hosts = world_size // per_host
    axes.set_xlim(0.0, length_ms)
    axes.set_ylim(world_size - 0.5, -0.5)
    every = 1 if world_size <= MAX_BARS else max(per_host, world_size // 16)
    axes.set_yticks(range(0, world_size, every))
    axes.tick_params(labelsize=8)
    axes.set_xlabel("ms since the shown step began", fontsize=8)
    axes.set_ylabel("rank" if num_hosts == 1 else f"rank ({per_host} a host)", fontsize=8)
    if 1 < num_hosts <= MAX_BARS:
        for host in range(1, num_hosts):
            axes.axhline(host * per_host - 0.5, color="#555555", linewidth=0.4, linestyle=":")


def _draw_waits(axes: Axes, run: SimulatedRun) -> None:
    """Draw how long each rank waits for others, averaged over all steps."""
    waiting = run.step.breakdown.parts_ms[WAITING]
    axes.barh(
        range(len(waiting)),
        waiting,
        height=0.8 if len(waiting) <= MAX_BARS else 1.0,
        color="#bbbbbb",
    )
    axes.set_xlim(0, max(1e-3, float(waiting.max()) * 1.05))
    axes.tick_params(labelsize=8, left=False)
    axes.set_xlabel("waits for others,\nms a step", fontsize=8)
