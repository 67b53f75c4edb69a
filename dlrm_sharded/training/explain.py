"""A plan in words and pictures: what each rank holds, and which tables make it slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlrm_sharded.cost.types import STAGES, PlanCost
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.search.insight import Insight
from dlrm_sharded.search.words import forecast, sections
from dlrm_sharded.tables import Table
from dlrm_sharded.task import GIB, ShardingTask

MAX_TABLES_SHOWN = 8
MANY_RANKS = 16
STAGE_LABELS = tuple(stage.replace("_", " ") for stage in STAGES)


@dataclass(frozen=True, slots=True)
class ShardShare:
    """One shard's part in the work of its rank.

    Args:
        cost_ms: the rank's cost, divided among its shards: computation in proportion to columns
            read (columns x ids per sample), communication in proportion to columns, and so is
            computation where nothing is read; None where the rank's cost is not known.
        work: columns read per sample.
    """

    shard: Shard
    table: Table
    size_bytes: int
    work: float
    cost_ms: float | None


def shares_of_rank(
    plan: ShardingPlan, task: ShardingTask, rank: int, cost: PlanCost | None
) -> list[ShardShare]:
    """The shards of a rank, the costliest first, or those with most work without a cost."""
    tables = {table.name: table for table in task.tables}
    on_rank = [shard for shard in plan.shards if shard.rank == rank]
    work = [_columns_read(shard, tables[shard.table]) for shard in on_rank]
    sum_work = sum(work)
    sum_cols = sum(shard.num_cols for shard in on_rank)
    shares = []
    for shard, shard_work in zip(on_rank, work, strict=True):
        cost_ms = None
        if cost is not None:
            stages = cost.per_rank[rank]
            compute_ms = stages.fwd_compute_ms + stages.bwd_compute_ms
            comm_ms = stages.fwd_comm_ms + stages.bwd_comm_ms
            by_cols = shard.num_cols / sum_cols
            by_work = shard_work / sum_work if sum_work else by_cols
            cost_ms = compute_ms * by_work + comm_ms * by_cols
        shares.append(
            ShardShare(
                shard=shard,
                table=tables[shard.table],
                size_bytes=shard.bytes_on(task.topology),
                work=shard_work,
                cost_ms=cost_ms,
            )
        )
    return sorted(shares, key=lambda share: (share.cost_ms or 0.0, share.work), reverse=True)


def explain(
    plan: ShardingPlan,
    task: ShardingTask,
    cost: PlanCost | None,
    insight: Insight | None = None,
) -> str:
    """The plan as Markdown: ranks, then the shards of every rank, the slowest rank first.

    Args:
        insight: what the cost model has to say of the plan, before the ranks.
    """
    ranks = range(plan.world_size)
    slowest_first = sorted(ranks, key=lambda r: -_rank_cost_ms(cost, r))
    shares = {rank: shares_of_rank(plan, task, rank, cost) for rank in ranks}
    lines = [
        f"**{plan.sharder}**: {len(plan.shards)} shards of {len(task.tables)} tables on "
        f"{plan.world_size} ranks, {sum(plan.bytes_by_rank(task.topology)) / GIB:.3f} GiB."
    ]
    if cost is not None:
        slowest = slowest_first[0]
        top = shares[slowest][:3]
        if top:
            blame = ", ".join(f"{s.shard.table} ({_ms(s.cost_ms)} ms)" for s in top)
            lines.append(
                f"Rank {slowest} is the slowest with {_rank_cost_ms(cost, slowest):.2f} ms "
                f"({cost.imbalance:.2f} x the mean); its largest parts: {blame}."
            )
        if plan.predicted is not None:
            lines += ["", *_prediction_table(plan.predicted, cost)]
    if insight is not None:
        lines += _insight_lines(plan, insight)
    lines += [
        "",
        "| rank | shards | GiB | columns | columns read per sample | cost ms |",
        "|---|---|---|---|---|---|",
    ]
    for rank in ranks:
        held = shares[rank]
        lines.append(
            f"| {rank} | {len(held)} | {sum(s.size_bytes for s in held) / GIB:.3f} | "
            f"{sum(s.shard.num_cols for s in held)} | {sum(s.work for s in held):,.0f} | "
            f"{_ms(None if cost is None else cost.per_rank[rank].total_ms)} |"
        )
    lines += [
        "",
        "A shard's cost is its share of its rank's: of computation by columns read, "
        "of communication by columns.",
        "",
        "| rank | table | rows | columns | ids per sample | MiB | cost ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for rank in slowest_first:
        for share in shares[rank]:
            lines.append(
                f"| {rank} | {share.table.name} | {_part(share.shard.rows)} | "
                f"{_part(share.shard.cols)} | {share.table.pooling_factor:.1f} | "
                f"{share.size_bytes / 2**20:.1f} | {_ms(share.cost_ms)} |"
            )
    return "\n".join(lines)


def _insight_lines(plan: ShardingPlan, insight: Insight) -> list[str]:
    lines = []
    if (expected := forecast(plan)) is not None:
        lines += ["", f"It is {expected}."]
    for section in sections(insight):
        lines += ["", f"**{section.title}**", "", *(f"- {line}" for line in section.lines)]
    return lines


def difference(predicted_ms: float, measured_ms: float) -> str:
    """By how much of the measured time the prediction is off."""
    if measured_ms <= 0:
        return "-"
    return f"{100 * (predicted_ms / measured_ms - 1):+z.0f} %"


def plot_cost_by_rank(
    cost: PlanCost,
    *,
    predicted: PlanCost | None = None,
    max_ms: float | None = None,
    num_ranks: int | None = None,
    label: str = "ms per step",
) -> Figure:
    """Stacked bars: the four stages of every rank.

    Args:
        predicted: in thin bars below the others; of many ranks, a mark where each would end.
        max_ms: end of the axis of time, and `num_ranks` of that of ranks: the same for all figures
            that are compared by eye. Without it the axis ends at a round number, so that those of
            similar runs have the same one mostly.
    """
    figure, axes = thumbnail()
    ranks = range(len(cost.per_rank))
    longest_ms = cost.cost_ms if predicted is None else max(cost.cost_ms, predicted.cost_ms)
    if predicted is None or len(ranks) > MANY_RANKS:
        stack_bars(axes, ranks, STAGE_LABELS, _stage_widths(cost))
    else:
        places = [rank - 0.12 for rank in ranks]
        stack_bars(axes, places, STAGE_LABELS, _stage_widths(cost), height=0.56)
        below = [rank + 0.29 for rank in ranks]
        stack_bars(axes, below, [""] * len(STAGES), _stage_widths(predicted), height=0.22)
        label = f"{label} (thin: predicted)"
    if predicted is not None and len(ranks) > MANY_RANKS:
        axes.plot([rank.total_ms for rank in predicted.per_rank], ranks, "k|", markersize=4)
        label = f"{label} (black: predicted)"
    axes.set_xlim(0, _rounded_up(longest_ms) if max_ms is None else max_ms)
    _finish_ranks(figure, axes, num_ranks or len(ranks), label, columns=4)
    return figure


def plot_memory_by_rank(plan: ShardingPlan, task: ShardingTask) -> Figure:
    """Stacked bars: the memory of the largest tables, and of all others, on every rank."""
    figure, axes = thumbnail()
    bytes_of_table: dict[str, int] = {}
    for shard in plan.shards:
        size = shard.bytes_on(task.topology)
        bytes_of_table[shard.table] = bytes_of_table.get(shard.table, 0) + size
    by_size = sorted(bytes_of_table, key=lambda name: (-bytes_of_table[name], name))
    groups = [{name} for name in by_size[:MAX_TABLES_SHOWN]]
    labels = by_size[:MAX_TABLES_SHOWN]
    if others := set(by_size[MAX_TABLES_SHOWN:]):
        groups.append(others)
        labels.append(f"{len(others)} others")
    widths = [[0.0] * plan.world_size for _ in groups]
    for names, of_group in zip(groups, widths, strict=True):
        for shard in plan.shards:
            if shard.table in names:
                of_group[shard.rank] += shard.bytes_on(task.topology) / 2**20
    stack_bars(axes, range(plan.world_size), labels, widths)
    _finish_ranks(figure, axes, plan.world_size, "MiB of tables", columns=3)
    return figure


def thumbnail(height: float = 2.9) -> tuple[Figure, Axes]:
    """A figure that reads well where TensorBoard shows it, about 330 pixels wide."""
    figure = Figure(figsize=(4.6, height), dpi=150, layout="constrained")
    return figure, figure.subplots()


def stack_bars(
    axes: Axes,
    places: Sequence[float],
    labels: Sequence[str],
    widths: Sequence[Sequence[float]],
    *,
    height: float = 0.8,
) -> None:
    """Horizontal bars of parts put end to end; a part has a label, a colour, a width by place."""
    left = [0.0] * len(places)
    for i, (label, of_part) in enumerate(zip(labels, widths, strict=True)):
        axes.barh(places, of_part, height, left=left, label=label, color=f"C{i}")
        left = [a + b for a, b in zip(left, of_part, strict=True)]


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
    axes.set_yticks(
        range(num_ranks) if num_ranks <= MANY_RANKS else range(0, num_ranks, num_ranks // 8)
    )
    axes.set_ylim(num_ranks - 0.4, -0.6)
    legend_above(figure, columns=columns)


def _stage_widths(cost: PlanCost) -> list[list[float]]:
    return [[rank.stage_ms(stage) for rank in cost.per_rank] for stage in STAGES]


def _prediction_table(predicted: PlanCost, measured: PlanCost) -> list[str]:
    times = {
        label: (predicted.stage_max_ms(stage), measured.stage_max_ms(stage))
        for stage, label in zip(STAGES, STAGE_LABELS, strict=True)
    }
    times["critical path"] = predicted.critical_path_ms, measured.critical_path_ms
    times["embedding cost"] = predicted.cost_ms, measured.cost_ms
    return [
        "| stage (max over ranks) | predicted ms | measured ms | difference |",
        "|---|---|---|---|",
        *(f"| {name} | {a:.2f} | {b:.2f} | {difference(a, b)} |" for name, (a, b) in times.items()),
    ]


def _rounded_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    if value <= 0:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(value))
    return next(step * decade for step in (1, 2, 5, 10) if value <= step * decade)


def _columns_read(shard: Shard, table: Table) -> float:
    """Columns that the lookup of a shard reads per sample; row blocks share the ids evenly."""
    return shard.num_cols * table.pooling_factor * shard.num_rows / table.num_embeddings


def _rank_cost_ms(cost: PlanCost | None, rank: int) -> float:
    return 0.0 if cost is None else cost.per_rank[rank].total_ms


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _part(interval: tuple[int, int]) -> str:
    return f"{interval[0]:,} to {interval[1]:,}"
