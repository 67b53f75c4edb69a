"""Draw the cost and the memory of every rank under a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dlrm_sharded.explain.text import STAGE_TITLES
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.task import ShardingTask

Floats = NDArray[np.float64]

MAX_TABLES_SHOWN = 8
"""Largest number of tables that have their own bars."""

MAX_RANK_TICKS = 16
"""Largest number of ranks for which each rank has a tick and each prediction a bar."""


def plot_cost_by_rank(cost: PlanCost, *, predicted: PlanCost | None = None) -> Figure:
    """Draw the four stages of every rank as stacked bars.

    The time axis ends at a round number, so that similar runs mostly share it.

    Args:
        predicted: drawn as thin bars below the others; for many ranks, as marks where bars end.
    """
    figure, axes = thumbnail()
    label = "ms per step"
    ranks = np.arange(len(cost.per_rank), dtype=np.float64)
    longest_ms = cost.cost_ms if predicted is None else max(cost.cost_ms, predicted.cost_ms)
    if predicted is None or len(ranks) > MAX_RANK_TICKS:
        stack_bars(axes, ranks, STAGE_TITLES, _stage_widths(cost))
        if predicted is not None:
            axes.plot([rank.total_ms for rank in predicted.per_rank], ranks, "k|", markersize=4)
            label = f"{label} (black: predicted)"
    else:
        stack_bars(axes, ranks - 0.12, STAGE_TITLES, _stage_widths(cost), height=0.56)
        unnamed = [""] * len(STAGES)
        stack_bars(axes, ranks + 0.29, unnamed, _stage_widths(predicted), height=0.22)
        label = f"{label} (thin: predicted)"
    axes.set_xlim(0, _rounded_up(longest_ms))
    _finish_ranks(figure, axes, len(ranks), label, columns=4)
    return figure


def plot_memory_by_rank(plan: ShardingPlan, task: ShardingTask) -> Figure:
    """Draw the memory of the largest tables, and of all others together, as stacked bars."""
    figure, axes = thumbnail()
    mib = {shard.table: np.zeros(plan.world_size) for shard in plan.shards}
    for shard in plan.shards:
        mib[shard.table][shard.rank] += shard.bytes_on(task.topology) / 2**20
    by_size = sorted(mib, key=lambda name: (-mib[name].sum(), name))
    labels = by_size[:MAX_TABLES_SHOWN]
    widths = [mib[name] for name in labels]
    if others := by_size[MAX_TABLES_SHOWN:]:
        labels.append(f"{len(others)} others")
        widths.append(np.sum([mib[name] for name in others], axis=0))
    stack_bars(axes, range(plan.world_size), labels, widths)
    _finish_ranks(figure, axes, plan.world_size, "MiB of tables", columns=3)
    return figure


def thumbnail(height: float = 2.9) -> tuple[Figure, Axes]:
    """Return a figure that reads well where TensorBoard shows it, about 330 pixels wide."""
    figure = Figure(figsize=(4.6, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


def stack_bars(
    axes: Axes,
    places: Sequence[float] | Floats,
    labels: Sequence[str],
    widths: Sequence[Sequence[float] | Floats],
    *,
    height: float = 0.8,
) -> None:
    """Draw horizontal bars of parts end to end; each part has a label, and a width in each bar."""
    left = np.zeros(len(places))
    for i, (label, part_widths) in enumerate(zip(labels, widths, strict=True)):
        axes.barh(places, part_widths, height, left=left, label=label, color=f"C{i}")
        left = left + np.asarray(part_widths)


def legend_above(figure: Figure, *, columns: int) -> None:
    figure.legend(
        loc="outside upper center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        columnspacing=1.0,
        handlelength=1.0,
        handletextpad=0.4,
    )


def _finish_ranks(figure: Figure, axes: Axes, num_ranks: int, label: str, *, columns: int) -> None:
    axes.set_xlabel(label)
    axes.set_ylabel("rank")
    axes.set_yticks(range(0, num_ranks, 1 if num_ranks <= MAX_RANK_TICKS else num_ranks // 8))
    axes.set_ylim(num_ranks - 0.4, -0.6)
    legend_above(figure, columns=columns)


def _stage_widths(cost: PlanCost) -> list[Floats]:
    return [np.array([rank.stage_ms(stage) for rank in cost.per_rank]) for stage in STAGES]


def _rounded_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ..."""
    if value <= 0:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(value))
    return next(step * decade for step in (1, 2, 5, 10) if value <= step * decade)
