"""Column shards of sequences: TorchRec trains them at one width in each module.

A module (`EmbeddingCollection`) looks up all of its column shards in one kernel, which has a single
width where vectors are not pooled ("Mixed dimension tables only supported for pooling tables").
Whole tables are looked up beside them, in a kernel of their own, if they are declared table-wise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.layouts import (
    OTHER_LAYOUTS,
    is_replicated,
    is_row_wise,
    num_equal_shards,
    sequence_title,
)
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import Topology


def equal_widths(tables: Iterable[Table], topology: Topology) -> dict[str, tuple[int, ...]]:
    """Return the widths of column shards that each module of sequences can have, widest first.

    A module has none if one of its tables may not be split by columns, or has too few of them.
    Tables that are too wide for one lookup have one width: that of a rank's equal shards.
    """
    modules: dict[str, list[Table]] = {}
    for table in tables:
        if not table.pooled:
            modules.setdefault(table.module, []).append(table)
    return {
        module: widths
        for module, own in modules.items()
        if all("columns" in table.layouts for table in own)
        and (widths := _widths(own[0].embedding_dim, topology))
    }


def _widths(num_cols: int, topology: Topology) -> tuple[int, ...]:
    if num_cols > topology.max_shard_columns:
        number = num_equal_shards(num_cols, topology)
        return (num_cols // number,) if number else ()
    numbers = range(2, num_cols // COLUMN_MULTIPLE + 1)
    return tuple(num_cols // n for n in numbers if num_cols % (COLUMN_MULTIPLE * n) == 0)


def split_widths(tables: Iterable[Table], shards: Mapping[str, Sequence[Shard]]) -> dict[str, int]:
    """Return the width of column shards in each module of sequences that has any.

    Args:
        tables: those of a task, in which the sequences of a module have the same width.
        shards: of each table.

    Raises:
        InvalidPlanError: widths differ; the message names tables, module and widths.
    """
    first: dict[str, tuple[Table, int]] = {}
    for table in tables:
        own = shards[table.name]
        if table.pooled or len(own) == 1 or is_replicated(own) or is_row_wise(own, table):
            continue
        for shard in own:
            other, width = first.setdefault(table.module, (table, shard.num_cols))
            if shard.num_cols != width:
                raise InvalidPlanError(
                    f"{sequence_title(table)}, and has a shard of {shard.num_cols} columns, and "
                    f"table {other.name!r} one of {width}; TorchRec looks up all column shards of "
                    f"such a module at one width: {OTHER_LAYOUTS}"
                )
    return {module: width for module, (_, width) in first.items()}
