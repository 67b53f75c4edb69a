"""Checks that a plan can be trained."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_sharded.files.errors import ConfigError, InvalidPlanError
from dlrm_sharded.plans.layouts import is_replicated, is_row_wise, layout_of, sequence_title
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.precision import why_not_exchanged
from dlrm_sharded.plans.table_optimizers import why_not_replicated
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, MEMORY_KEYS, ShardingTask, Topology, in_half

FP16_KEYS = "sharder.table_precision=fp16, or precision in task.json; docs/guide/planning.md"
"""Where users put tables into fp16, for messages."""

SPLITTING_ADVICE = "use a sharder that splits tables (sharder=search)"


def validate(plan: ShardingPlan, task: ShardingTask) -> None:
    """Refuse a plan that cannot be trained for the task.

    Raises:
        InvalidPlanError: a world size, table or rank is wrong; shards overlap, leave a gap or
            exceed their table; columns are not multiples of 4 or too many for one lookup; TorchRec
            does not train the layout of a table; a table is only partly replicated, or replicated
            in fp16 or under an optimizer that trains no replicas; the shards of a table have
            different precisions; the ranks cannot exchange numbers in the plan's precision; or a
            rank needs more memory than it has. The message has the numbers.
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
            _check_rectangle(shard, table, topology)
        found = sorted({shard.precision for shard in shards})
        if len(found) > 1:
            raise InvalidPlanError(
                f"table {table.name!r} has shards in {' and in '.join(found)}; all of its shards "
                "must have the same precision"
            )
        if not is_replicated(shards) and not is_row_wise(shards, table):
            _check_columns(shards, table)
        layout_of(shards, table, topology)  # raises if there is none
        if is_replicated(shards) and not task.can_replicate:
            assert task.known_optimizer is not None
            raise InvalidPlanError(
                f"table {table.name!r} is replicated, and the optimizer of the tables is "
                f"{why_not_replicated(task.known_optimizer)}"
            )
    local_batch_size = task.batch_size // topology.world_size
    if reason := why_not_exchanged(
        plan.exchange_precision, topology.compute_device, local_batch_size
    ):
        raise InvalidPlanError(f"the plan's {reason}")
    _check_memory(plan, task)


def check_pooled(tables: Sequence[Table], why: str) -> None:
    """Raise ConfigError with the reason if a table is a sequence, which this project only plans."""
    for table in tables:
        if not table.pooled:
            raise ConfigError(f"{sequence_title(table)}, and {why}")


def why_too_large(task: ShardingTask, rank_memory_bytes: Sequence[int]) -> str | None:
    """Return the proof that no plan fits because the tables need more memory than all ranks have.

    The message says on how many ranks they would fit, and whether they would fit in fp16.
    """
    needed, memory = task.table_bytes, sum(rank_memory_bytes)
    if needed <= memory:
        return None
    num_ranks = len(rank_memory_bytes)
    enough = -(-needed * num_ranks // max(1, memory))
    return (
        f"no plan can fit: the tables need {needed:,} B ({needed / GIB:.2f} GiB), all {num_ranks} "
        f"ranks together have {memory:,} B ({memory / GIB:.2f} GiB); add ranks ({enough:,} such "
        f"ranks have as many bytes) or memory ({MEMORY_KEYS}){fp16_advice(task, memory)}"
    )


def fp16_advice(task: ShardingTask, memory: int) -> str:
    """Return advice to use fp16 if the tables would then fit into the memory, else no text."""
    needed = in_half(task).table_bytes
    if needed > memory or needed == task.table_bytes:
        return ""
    return f"; tables in fp16 ({FP16_KEYS}) would fit with {needed:,} B ({needed / GIB:.2f} GiB)"


def why_too_wide(task: ShardingTask, *, splits: bool = True) -> str | None:
    """Return why the widest table cannot be placed with at most one shard per rank, if so.

    It is None if the table can be placed.

    Args:
        splits: whether the plan may split tables.
    """
    topology = task.topology
    widest = max(task.tables, key=lambda table: (table.embedding_dim, not table.pooled))
    num_shards = -(-widest.embedding_dim // topology.max_shard_columns)
    if num_shards <= (topology.world_size if splits and widest.pooled else 1):
        return None
    if not widest.pooled:
        return why_sequence_too_wide(widest, topology)
    if num_shards <= topology.world_size:
        advice = f"it has to be split; {SPLITTING_ADVICE}"
    else:
        advice = (
            f"with one shard of it on a rank it needs {num_shards} ranks, the job has "
            f"{topology.world_size}; add ranks, reduce its embedding_dim, or use "
            "sharder=search or torchrec, which put several shards of a table on a rank"
        )
    return f"{_too_wide(f'table {widest.name!r}', widest.embedding_dim, topology)}: {advice}"


def why_sequence_too_wide(table: Table, topology: Topology) -> str:
    """Return why no plan has a sequence table of more columns than lookups support."""
    text = _too_wide(f"{sequence_title(table)} and", table.embedding_dim, topology)
    return f"{text}, and no plan splits it; reduce its embedding_dim"


def _too_wide(title: str, num_cols: int, topology: Topology) -> str:
    return (
        f"{title} has {num_cols:,} columns, and FBGEMM looks up shards of "
        f"{topology.max_shard_columns:,} columns or fewer on {topology.compute_device}"
    )


def _check_rectangle(shard: Shard, table: Table, topology: Topology) -> None:
    if not 0 <= shard.rank < topology.world_size:
        raise InvalidPlanError(f"{shard}: the ranks are 0 to {topology.world_size - 1}")
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
    if shard.num_cols > topology.max_shard_columns:
        if not table.pooled:
            raise InvalidPlanError(why_sequence_too_wide(table, topology))
        text = _too_wide(f"shard {shard}", shard.num_cols, topology)
        raise InvalidPlanError(f"{text}; split the table's columns, or {SPLITTING_ADVICE}")


def _check_columns(shards: Sequence[Shard], table: Table) -> None:
    """Check that shards with all rows neither overlap nor leave a gap.

    Args:
        shards: ordered by their first column.
    """
    edge = 0
    for start, stop in (*(shard.cols for shard in shards), (table.embedding_dim,) * 2):
        if start != edge:
            first, last = sorted((start, edge))
            what = "in no shard; shards must cover the whole table"
            if start < edge:
                last, what = min(edge, stop), "in two shards; shards must not overlap"
            raise InvalidPlanError(f"table {table.name!r}: cols [{first}, {last}) are {what}")
        edge = stop


def _check_memory(plan: ShardingPlan, task: ShardingTask) -> None:
    used_by_rank = plan.bytes_by_rank(task.topology)
    capacities = task.topology.rank_memory_bytes
    for rank, (used, capacity) in enumerate(zip(used_by_rank, capacities, strict=True)):
        if used > capacity:
            on_rank = plan.shards_by_rank()[rank]
            largest = max(on_rank, key=lambda shard: shard.bytes_on(task.topology))
            raise InvalidPlanError(
                f"rank {rank} would hold {used:,} B of tables ({used / GIB:.2f} GiB), it has "
                f"{capacity:,} B ({capacity / GIB:.2f} GiB); largest there: {largest} with "
                f"{largest.bytes_on(task.topology):,} B; add ranks or memory ({MEMORY_KEYS}), or "
                "use another sharder"
            )
