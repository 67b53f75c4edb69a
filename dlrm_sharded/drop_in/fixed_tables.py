"""A sharder beside tables that must not lie whole on a rank: it places all the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.task_keys import MEMORY_KEYS
from dlrm_sharded.sharders.base import Sharder, sharder_name


@dataclass(frozen=True, slots=True)
class FixedTable:
    """A table that lies in one of some layouts, none of which has it whole on a rank.

    Args:
        layouts: names of `plans.tables.LAYOUTS`; the first one is taken.
        because: the reason, for a message: its TorchRec sharder trains it only row_wise.
        owner: how messages name the module of the table.
    """

    layouts: tuple[str, ...]
    because: str
    owner: str


@dataclass(eq=False)
class SharderBesideFixed:
    """Lays out the tables that have no choice, and asks another sharder for the rest.

    Tables with a smallest width of column shards are split by another plan without column shards
    of theirs, if the first plan has narrower ones.

    Args:
        fixed: by the name of the table.
        min_columns: smallest width of a table's column shards, by its name.
    """

    sharder: Sharder
    fixed: Mapping[str, FixedTable]
    min_columns: Mapping[str, int] = field(default_factory=dict)

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
        fixed = self._fixed_shards(task)
        others = tuple(table for table in task.tables if table.name not in self.fixed)
        beside = ShardingPlan(task.topology.world_size, tuple(fixed))
        if not others:
            return beside
        if fixed:
            topology = _without_memory_of(beside, task.topology)
            task = dataclasses.replace(task, tables=others, topology=topology)
        plan = self.sharder.shard(task)
        if narrow := self._too_narrow(plan):
            layouts = {t.name: t.layouts - {"columns"} for t in task.tables if t.name in narrow}
            plan = self.sharder.shard(task.with_values(layouts=layouts))
        return dataclasses.replace(plan, shards=(*plan.shards, *fixed)) if fixed else plan

    def _too_narrow(self, plan: ShardingPlan) -> set[str]:
        by_table = plan.shards_by_table()
        return {
            name
            for name, least in self.min_columns.items()
            if len(by_table.get(name, ())) > 1 and min(s.num_cols for s in by_table[name]) < least
        }

    def _fixed_shards(self, task: ShardingTask) -> list[Shard]:
        """Return the shards of the fixed tables, the largest first, as hosts fill up by them."""
        topology = task.topology
        free = list(topology.rank_memory_bytes)
        shards: list[Shard] = []
        for table in sorted(task.tables, key=topology.table_bytes, reverse=True):
            if table.name not in self.fixed:
                continue
            own = _laid_out(table, self.fixed[table.name], topology, free)
            used = ShardingPlan(topology.world_size, tuple(own)).bytes_by_rank(topology)
            free = [have - takes for have, takes in zip(free, used, strict=True)]
            shards += own
        return shards


def _laid_out(table: Table, fixed: FixedTable, topology: Topology, free: list[int]) -> list[Shard]:
    layout = fixed.layouts[0]
    if layout == "replicas":
        return Replicas(topology.world_size).shards(table)
    on_a_host = layout == "host_rows"
    size = topology.ranks_per_host if on_a_host else topology.world_size
    starts = range(0, topology.world_size, size)
    start = max(starts, key=lambda start: min(free[start : start + size]))
    blocks = RowBlocks(range(start, start + size))
    if table.embedding_dim > topology.max_shard_columns or not blocks.is_possible(table):
        raise InfeasibleTaskError(
            f"table {table.name!r} of {fixed.owner} has {table.num_embeddings:,} rows and "
            f"{table.embedding_dim:,} columns; {fixed.because}, here in row blocks on all {size} "
            f"ranks{' of a host' if on_a_host else ''} with a row or more, and "
            f"{topology.max_shard_columns:,} columns at most: use fewer ranks"
        )
    return blocks.shards(table)


def _without_memory_of(beside: ShardingPlan, topology: Topology) -> Topology:
    """Return the topology with the memory that fixed tables leave.

    Raises:
        InfeasibleTaskError: they leave none on a rank.
    """
    used = beside.bytes_by_rank(topology)
    free = [have - own for have, own in zip(topology.rank_memory_bytes, used, strict=True)]
    if min(free) < 1:
        rank = free.index(min(free))
        raise InfeasibleTaskError(
            f"{len({shard.table for shard in beside.shards})} tables have to lie in row blocks or "
            f"replicas, which take {used[rank]:,} B of rank {rank}, and it has "
            f"{free[rank] + used[rank]:,} B; add ranks or memory ({MEMORY_KEYS})"
        )
    return dataclasses.replace(topology, memory_bytes_by_rank=tuple(free))
