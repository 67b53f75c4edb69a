"""The ranks of a task's plans, for a calibration that is spent on this task.

A calibration has fewer ranks and less memory than the task. So it measures a few ranks of a plan at
a time, which look up as many ids in as many rows as they would beside all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.accesses.patterns import ReuseBinAccesses
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.random_plans import RankLimits, within_limits
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.layouts import layout_of
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask


@dataclass(frozen=True, slots=True)
class TaskPlans:
    """Plans of a task between which its prices decide.

    Args:
        task: with plans of any number of ranks.
        plans: at least one.
    """

    task: ShardingTask
    plans: Sequence[ShardingPlan]

    def draw(
        self, rng: np.random.Generator, *, world_size: int, limits: RankLimits
    ) -> tuple[int, list[DrawnTable]]:
        """Draw some ranks of a plan; return a global batch that they share, and their tables."""
        plan = self.plans[int(rng.integers(len(self.plans)))]
        busy = [rank for rank, shards in enumerate(plan.shards_by_rank()) if shards]
        ranks = rng.choice(busy, size=world_size, replace=len(busy) < world_size).tolist()
        batch_size = max(self.task.batch_size // world_size, 1) * world_size
        drawn = tables_of_ranks(plan, self.task, ranks)
        return batch_size, within_limits(limits, drawn, world_size, batch_size)


def tables_of_ranks(
    plan: ShardingPlan, task: ShardingTask, ranks: Sequence[int]
) -> list[DrawnTable]:
    """Return what some ranks of a plan hold, as tables of a plan on these ranks alone.

    A row block becomes a table in as many blocks as there are ranks, and a replica one on each of
    them; both have as many ids on a rank as before. Each is there once, however many ranks have it.
    """
    tables = {table.name: table for table in with_profiles(task).tables}
    by_table, by_rank = plan.shards_by_table(), plan.shards_by_rank()
    drawn, shared = [], set[str]()
    for place, rank in enumerate(ranks):
        for shard in by_rank[rank]:
            table = tables[shard.table]
            layout = layout_of(by_table[table.name], table, task.topology)
            if layout.group_size == 1:
                drawn.append(_drawn(shard, table, place, 1.0))
            elif table.name not in shared:
                shared.add(table.name)
                part = 1 / plan.world_size if shard.replicated else 1.0
                drawn.append(_drawn(shard, table, None, part * len(ranks)))
    return drawn


def _drawn(shard: Shard, table: Table, rank: int | None, factor: float) -> DrawnTable:
    """Return a shard as a table that gets so many times the ids of the shard's rows."""
    assert table.reuse_histogram is not None, "the task has profiles"
    in_blocks = rank is None and not shard.replicated
    return DrawnTable(
        num_rows=round(shard.num_rows * factor) if in_blocks else shard.num_rows,
        num_cols=shard.num_cols,
        pooling_factor=table.pooling_factor * factor * shard.num_rows / table.num_embeddings,
        accesses=ReuseBinAccesses.of_histogram(table.reuse_histogram),
        rank=rank,
        replicated=shard.replicated,
        pooled=table.pooled,
    )
