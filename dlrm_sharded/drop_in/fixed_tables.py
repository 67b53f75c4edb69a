"""Places tables that must not lie whole on a rank, and leaves all others to a sharder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import MEMORY_KEYS, ShardingTask, Topology
from dlrm_sharded.sharders.base import Sharder, sharder_name


@dataclass(frozen=True, slots=True)
class FixedTable:
    """A table that must lie in row blocks or replicas.

    Args:
        layout: "rows", "host_rows" or "replicas".
        because: the reason, for messages, such as its constraints allow only row_wise.
        owner: how messages name the module of the table.
    """

    layout: str
    because: str
    owner: str


@dataclass(eq=False)
class WithFixedTables:
    """Lays out the tables that have no choice, and leaves the rest to another sharder.

    If that sharder makes column shards narrower than `min_columns`, it plans once more, and the
    tables of these shards then have none.

    Args:
        fixed: the tables that have no choice, by name.
        min_columns: smallest width of a table's column shards, by its name.
    """

    sharder: Sharder
    fixed: Mapping[str, FixedTable]
    min_columns: Mapping[str, int]

    def __post_init__(self) -> None:
        self.name = sharder_name(self.sharder)
        self.exchange_precision = getattr(self.sharder, "exchange_precision", None)
        self.table_precision = getattr(self.sharder, "table_precision", None)
        self.uses_costs = getattr(self.sharder, "uses_costs", None)
        self.costs = getattr(self.sharder, "costs", None)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Return the plan of all tables.

        Raises:
            InfeasibleTaskError: the fixed tables do not fit, or the sharder finds no plan.
        """
        topology, fixed = self._place_fixed(task)
        others = tuple(table for table in task.tables if table.name not in self.fixed)
        if not others:
            return ShardingPlan(task.topology.world_size, tuple(fixed))
        task = dataclasses.replace(task, tables=others, topology=topology)
        plan = self.sharder.shard(task)
        by_table = plan.shards_by_table()
        too_narrow = {
            table.name: table.layouts - {"columns"}
            for table in others
            if len(by_table[table.name]) > 1
            and min(s.num_cols for s in by_table[table.name]) < self.min_columns.get(table.name, 0)
        }
        if too_narrow:
            plan = self.sharder.shard(task.with_values(layouts=too_narrow))
        return dataclasses.replace(plan, shards=(*plan.shards, *fixed))

    def _place_fixed(self, task: ShardingTask) -> tuple[Topology, list[Shard]]:
        """Return the topology with the memory that fixed tables leave, and their shards.

        The largest come first, because they fill up the hosts.

        Raises:
            InfeasibleTaskError: they leave no memory on a rank.
        """
        topology, shards = task.topology, list[Shard]()
        for table in sorted(task.tables, key=task.topology.table_bytes, reverse=True):
            fixed, memory = self.fixed.get(table.name), topology.rank_memory_bytes
            if fixed is None:
                continue
            own = _laid_out(table, fixed, topology)
            used = ShardingPlan(topology.world_size, tuple(own)).bytes_by_rank(topology)
            free = [have - takes for have, takes in zip(memory, used, strict=True)]
            if min(free) < 1:
                rank = free.index(min(free))
                raise InfeasibleTaskError(
                    f"table {table.name!r} of {fixed.owner} takes {used[rank]:,} B of rank {rank}; "
                    f"{fixed.because}, and {memory[rank]:,} B remain after larger tables that "
                    f"have no choice either; add ranks or memory ({MEMORY_KEYS})"
                )
            topology = dataclasses.replace(topology, memory_bytes_by_rank=tuple(free))
            shards += own
        return topology, shards


def _laid_out(table: Table, fixed: FixedTable, topology: Topology) -> list[Shard]:
    """Return the shards of a fixed table, on the host with most memory for one in `host_rows`."""
    if fixed.layout == "replicas":
        return Replicas(topology.world_size).shards(table)
    size = topology.ranks_per_host if fixed.layout == "host_rows" else topology.world_size
    free = topology.rank_memory_bytes
    starts = range(0, topology.world_size, size)
    start = max(starts, key=lambda start: min(free[start : start + size]))
    blocks = RowBlocks(range(start, start + size))
    if table.embedding_dim > topology.max_shard_columns or not blocks.is_possible(table):
        raise InfeasibleTaskError(
            f"table {table.name!r} of {fixed.owner} has {table.num_embeddings:,} rows and "
            f"{table.embedding_dim:,} columns; {fixed.because}, here in row blocks on {size} ranks "
            f"with a row or more, and {topology.max_shard_columns:,} columns at most: use fewer "
            "ranks"
        )
    return blocks.shards(table)
