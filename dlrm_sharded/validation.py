"""Checks that a sharder's plan can be trained, before anything uses the plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dlrm_sharded.errors import InvalidPlanError
from dlrm_sharded.layouts import layout_of
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import GIB, ShardingTask


def validate(plan: ShardingPlan, task: ShardingTask) -> None:
    """Refuse a plan that cannot be trained as it stands.

    Raises:
        InvalidPlanError: a wrong world size, table or rank; shards that overlap, leave a gap or
            reach out of their table; columns that are no multiples of 4; splits that TorchRec does
            not train; more memory than a rank has. The message has the numbers.
    """
    topology = task.topology
    if plan.world_size != topology.world_size:
        raise InvalidPlanError(
            f"the plan is for {plan.world_size} ranks, the job has {topology.world_size}; "
            f"start {plan.world_size} ranks or make a new plan"
        )
    shards_by_table = plan.shards_by_table()
    names = {table.name for table in task.tables}
    for unknown in shards_by_table.keys() - names:
        raise InvalidPlanError(
            f"the plan has shards of a table {unknown!r} that the task does not have; "
            "make the plan for these tables"
        )
    for table in task.tables:
        shards = shards_by_table.get(table.name, [])
        if not shards:
            raise InvalidPlanError(f"table {table.name!r} is in no shard; place every table")
        for shard in shards:
            _check_rectangle(shard, table, plan.world_size)
        _check_tiling(shards, table)
        layout_of(shards, table, topology)  # raises where there is none
    _check_memory(plan, task)


def _check_rectangle(shard: Shard, table: Table, world_size: int) -> None:
    if not 0 <= shard.rank < world_size:
        raise InvalidPlanError(f"{shard}: the ranks are 0 to {world_size - 1}")
    for axis, (start, stop), size in (
        ("rows", shard.rows, table.num_embeddings),
        ("cols", shard.cols, table.embedding_dim),
    ):
        if not 0 <= start < stop <= size:
            raise InvalidPlanError(
                f"{shard}: {axis} must be a non-empty part of [0, {size}), is [{start}, {stop})"
            )
    if shard.cols[0] % COLUMN_MULTIPLE or shard.cols[1] % COLUMN_MULTIPLE:
        raise InvalidPlanError(f"{shard}: cols must start and end at multiples of 4 (FBGEMM)")


def _check_tiling(shards: Sequence[Shard], table: Table) -> None:
    """Raise InvalidPlanError unless the shards tile the table exactly."""
    # Sweep over the row bands between all row boundaries; in each, columns must chain up.
    bounds = sorted({0, table.num_embeddings} | {row for s in shards for row in s.rows})
    for start, stop in itertools.pairwise(bounds):
        edge = 0
        band = [s for s in shards if s.rows[0] <= start and s.rows[1] >= stop]
        for shard in sorted(band, key=lambda s: s.cols):
            if shard.cols[0] < edge:
                raise InvalidPlanError(
                    f"table {table.name!r}: rows [{start}, {stop}), "
                    f"cols [{shard.cols[0]}, {min(edge, shard.cols[1])}) are in two shards; "
                    "shards must not overlap"
                )
            if shard.cols[0] > edge:
                break
            edge = shard.cols[1]
        else:
            if edge == table.embedding_dim:
                continue
        gap_end = min((s.cols[0] for s in band if s.cols[0] > edge), default=table.embedding_dim)
        raise InvalidPlanError(
            f"table {table.name!r}: rows [{start}, {stop}), cols [{edge}, {gap_end}) "
            "are in no shard; shards must cover the whole table"
        )


def _check_memory(plan: ShardingPlan, task: ShardingTask) -> None:
    used_by_rank = plan.bytes_by_rank(task.topology)
    capacities = task.topology.rank_memory_bytes
    for rank, (used, capacity) in enumerate(zip(used_by_rank, capacities, strict=True)):
        if used > capacity:
            on_rank = [shard for shard in plan.shards if shard.rank == rank]
            largest = max(on_rank, key=lambda shard: shard.bytes_on(task.topology))
            raise InvalidPlanError(
                f"rank {rank} would hold {used:,} B of tables ({used / GIB:.2f} GiB), it has "
                f"{capacity:,} B ({capacity / GIB:.2f} GiB); largest there: {largest} with "
                f"{largest.bytes_on(task.topology):,} B; add ranks, raise topology.memory_gib, "
                "or use another sharder"
            )
