"""Tasks from data frames, such as an inventory of tables in a csv file."""

from __future__ import annotations

from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology

COLUMNS = ("name", "num_embeddings", "embedding_dim", "pooling_factor")
OPTIONAL = ("reuse_histogram",)


def task_from_frame(frame: Any, topology: Topology, batch_size: int) -> ShardingTask:
    """Return the task whose tables are the rows of a data frame.

    Args:
        frame: of polars, pandas or Arrow, with the columns `COLUMNS` and perhaps `OPTIONAL`, which
            mean what they do for a `Table`. Other columns are left alone.
        batch_size: global, samples of all ranks together.

    Raises:
        ConfigError: a column is missing, or a value cannot be that of a table.
    """
    import polars as pl  # takes longer to load than most plans to make

    rows = frame if isinstance(frame, pl.DataFrame) else pl.DataFrame(frame)
    if missing := [column for column in COLUMNS if column not in rows.columns]:
        raise ConfigError(
            f"the frame has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}"
        )
    chosen = rows.select([name for name in (*COLUMNS, *OPTIONAL) if name in rows.columns])
    tables = tuple(Table(**row) for row in chosen.iter_rows(named=True))
    return ShardingTask(tables, topology, batch_size)
