"""What there is to say of a plan under a cost model, in lines for terminals and TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.search.insight import Alternative, Insight, RankCost, ShardCost, Split

MAX_SHOWN = 8
"""Splits, or tables in a list; of a rank, half as many shards."""


@dataclass(frozen=True, slots=True)
class Section:
    """Lines below a title."""

    title: str
    lines: tuple[str, ...]


def forecast(plan: ShardingPlan) -> str | None:
    """What a plan is predicted to cost, and how near that is to the least; None if not known."""
    if plan.predicted is None:
        return None
    text = f"predicted {plan.predicted.cost_ms:.2f} ms"
    if plan.gap is None:
        return text
    return f"{text}, at most {100 * plan.gap:z.1f} % above the best possible"


def sections(insight: Insight) -> list[Section]:
    """An insight in words."""
    return [
        Section("What bounds it", (_bounding(insight), *map(_rank, insight.ranks))),
        Section("What splits bought", tuple(_splits(insight))),
        Section(
            "What more would buy",
            (
                f"A short search, which knows no constraints, against {insight.cost_ms:.2f} ms:",
                *(_alternative(other, insight.cost_ms) for other in insight.alternatives),
            ),
        ),
    ]


def _bounding(insight: Insight) -> str:
    shown, found = len(insight.ranks), insight.num_bounding
    return (
        f"Predicted within 1 % of the slowest rank's {insight.cost_ms:.2f} ms: {found} of "
        f"{insight.world_size} ranks{f'; the {shown} slowest' if shown < found else ''}"
    )


def _rank(rank: RankCost) -> str:
    shown, others = rank.shards[: MAX_SHOWN // 2], rank.shards[MAX_SHOWN // 2 :]
    parts = [f"{_named(shard)} {shard.cost_ms:.2f} ms" for shard in shown]
    if others:
        parts.append(f"{len(others)} more {sum(shard.cost_ms for shard in others):.2f} ms")
    parts.append(f"launches and exchanges of all ranks {rank.other_ms:z.2f} ms")
    return f"rank {rank.rank}, {rank.cost_ms:.2f} ms: {', '.join(parts)}"


def _named(cost: ShardCost) -> str:
    shard, table = cost.shard, cost.table
    if shard.num_rows < table.num_embeddings:
        return f"{shard.table} (rows {shard.rows[0]:,} to {shard.rows[1]:,})"
    if shard.num_cols < table.embedding_dim:
        return f"{shard.table} (columns {shard.cols[0]:,} to {shard.cols[1]:,})"
    return shard.table


def _splits(insight: Insight) -> list[str]:
    if not insight.num_split:
        return ["No table is split."]
    lines = []
    if known := [split for split in insight.splits if split.gain_ms is not None]:
        lines.append("What the plan would cost more with a table whole, where it then costs least:")
        lines += [f"{_pieces(split)}: {_gain(split)}" for split in known[:MAX_SHOWN]]
    if others := known[MAX_SHOWN:]:
        lines.append(f"{len(others)} more: {_gain(others[0])} to {_gain(others[-1])}")
    if too_large := [split for split in insight.splits if split.gain_ms is None]:
        more = f" and {len(too_large) - MAX_SHOWN} more" if len(too_large) > MAX_SHOWN else ""
        names = ", ".join(map(_pieces, too_large[:MAX_SHOWN]))
        lines.append(f"{names}{more}: fits no rank whole")
    if left := insight.num_split - len(insight.splits):
        lines.append(f"split tables not looked at: {left}")
    return lines


def _pieces(split: Split) -> str:
    kind = "row blocks" if split.by_rows else "column shards"
    return f"{split.table} in {split.num_shards} {kind}"


def _gain(split: Split) -> str:
    """Below 0 where the plan would cost less with the table whole."""
    assert split.gain_ms is not None
    return f"{split.gain_ms:z.2f} ms"


def _alternative(other: Alternative, cost_ms: float) -> str:
    if other.cost_ms is None:
        return f"{other.change}: nothing found"
    less = 100 * (1 - other.cost_ms / cost_ms)
    return f"{other.change}: {other.cost_ms:.2f} ms, {less:.1f} % less"
