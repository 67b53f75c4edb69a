"""The shares of a rank's shards in its measured or predicted cost, in proportion to their work."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask


@dataclass(frozen=True, slots=True)
class ShardShare:
    """One shard's share in the work and the cost of its rank.

    Args:
        cost_ms: the rank's cost, divided among its shards: computation in proportion to columns
            read (columns x ids per sample), communication in proportion to columns of the vectors
            of a sample; either in proportion to columns if these are all 0; None if the rank's cost
            is not known.
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
    """Return the shards of a rank, the costliest first, or those with most work without a cost."""
    tables = {table.name: table for table in task.tables}
    on_rank = plan.shards_by_rank()[rank]
    work = [_columns_read(shard, tables[shard.table], plan.world_size) for shard in on_rank]
    columns = [float(shard.num_cols) for shard in on_rank]
    costs_ms: list[float | None] = [None] * len(on_rank)
    if cost is not None:
        sent = [_numbers_sent(shard, tables[shard.table]) for shard in on_rank]
        computed_ms = _divided(cost.per_rank[rank].computation_ms, work, columns)
        exchanged_ms = _divided(cost.per_rank[rank].exchange_ms, sent, columns)
        costs_ms = [a + b for a, b in zip(computed_ms, exchanged_ms, strict=True)]
    shares = [
        ShardShare(shard, tables[shard.table], shard.bytes_on(task.topology), shard_work, cost_ms)
        for shard, shard_work, cost_ms in zip(on_rank, work, costs_ms, strict=True)
    ]
    return sorted(shares, key=lambda share: (share.cost_ms or 0.0, share.work), reverse=True)


def _divided(ms: float, parts: list[float], columns: list[float]) -> list[float]:
    """Divide a time in proportion to the parts or, where all of them are 0, to the columns."""
    parts = parts if sum(parts) else columns
    return [ms * (part / sum(parts)) for part in parts]


def _columns_read(shard: Shard, table: Table, world_size: int) -> float:
    """Return the columns that a shard reads per sample of all ranks.

    Row blocks share the ids evenly, and so do replicas.
    """
    share = 1.0 / world_size if shard.replicated else shard.num_rows / table.num_embeddings
    return shard.num_cols * table.pooling_factor * share


def _numbers_sent(shard: Shard, table: Table) -> float:
    """Return columns times vectors of a sample; row blocks of sequences have only some vectors."""
    share = 1.0 if table.pooled else shard.num_rows / table.num_embeddings
    return shard.num_cols * table.vectors_per_sample * share
