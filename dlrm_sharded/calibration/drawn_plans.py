"""Plans of drawn tables, and the tasks that these are plans of."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology

BAGS, SEQUENCES = "", "sequences"
"""Modules of drawn tables: TorchRec has one for bags, and another one for sequences."""


def plan_of_drawn(
    drawn: Sequence[DrawnTable], batch_size: int, topology: Topology
) -> tuple[ShardingPlan, ShardingTask]:
    """Return the plan of drawn tables, and its task, whose tables have expected profiles."""
    tables = tuple(_table(f"t{i}", table, batch_size) for i, table in enumerate(drawn))
    shards = [
        shard
        for table, drawn_table in zip(tables, drawn, strict=True)
        for shard in _shards(table, drawn_table, topology.world_size)
    ]
    plan = ShardingPlan(topology.world_size, tuple(shards))
    return plan, ShardingTask(tables, topology, batch_size)


def _table(name: str, drawn: DrawnTable, batch_size: int) -> Table:
    """Return a drawn table with the reuse histogram that its accesses have on average."""
    num_ids = batch_size * drawn.pooling_factor
    histogram = drawn.accesses.distribution(drawn.num_rows, num_ids).expected_reuse_histogram(
        num_ids
    )
    return Table(
        name,
        drawn.num_rows,
        drawn.num_cols,
        drawn.pooling_factor,
        histogram,
        pooled=drawn.pooled,
        module=BAGS if drawn.pooled else SEQUENCES,
    )


def _shards(table: Table, drawn: DrawnTable, world_size: int) -> list[Shard]:
    if drawn.rank is not None:
        return [Shard.whole(table, drawn.rank)]
    if drawn.replicated:
        return Replicas(world_size).shards(table)
    return RowBlocks(range(world_size)).shards(table)
