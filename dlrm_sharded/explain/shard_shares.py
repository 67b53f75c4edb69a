"""The parts of the shards of a rank in its measured or predicted cost, by their work."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask


@dataclass(frozen=True, slots=True)
class ShardShare:
    """One shard's part in the work of its rank.

    Args:
        cost_ms: the rank's cost, divided among its shards: computation in proportion to columns
            read (columns x ids per sample), communication in proportion to columns of the vectors
            of a sample; both in proportion to columns where there are none of these; None where the
            rank's cost is not known.
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
    """Return the shards of a rank, the costliest first; without a cost, that with most work."""
    tables = {table.name: table for table in task.tables}
    on_rank = plan.shards_by_rank()[rank]
    work = [_columns_read(shard, tables[shard.table], plan.world_size) for shard in on_rank]
    sent = [_numbers_sent(shard, tables[shard.table]) for shard in on_rank]
    sum_work, sum_sent, sum_cols = sum(work), sum(sent), sum(shard.num_cols for shard in on_rank)
    shares = []
    for shard, shard_work, shard_sent in zip(on_rank, work, sent, strict=True):
        cost_ms = None
        if cost is not None:
            stages = cost.per_rank[rank]
            by_cols = shard.num_cols / sum_cols
            by_work = shard_work / sum_work if sum_work else by_cols
            by_sent = shard_sent / sum_sent if sum_sent else by_cols
            cost_ms = stages.computation_ms * by_work + stages.exchange_ms * by_sent
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


def _columns_read(shard: Shard, table: Table, world_size: int) -> float:
    """Return the columns that a shard reads per sample of all ranks.

    Row blocks share the ids evenly, and so do replicas.
    """
    share = 1.0 / world_size if shard.replicated else shard.num_rows / table.num_embeddings
    return shard.num_cols * table.pooling_factor * share


def _numbers_sent(shard: Shard, table: Table) -> float:
    """Return the columns of all vectors of a sample; row blocks of sequences have their ids'."""
    share = 1.0 if table.pooled else shard.num_rows / table.num_embeddings
    return shard.num_cols * table.vectors_per_sample * share
