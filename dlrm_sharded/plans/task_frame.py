"""Tasks from data frames, such as an inventory of tables in a csv file."""

from __future__ import annotations

from typing import Any

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology

FRAME_COLUMNS = ("name", "num_embeddings", "embedding_dim", "pooling_factor")
"""Columns that a data frame of tables must have."""


def task_from_frame(frame: Any, topology: Topology, batch_size: int) -> ShardingTask:
    """Return the task whose tables are the rows of a data frame.

    Args:
        frame: a polars, pandas or Arrow frame with the columns `FRAME_COLUMNS` and, if known,
            reuse_histogram, all as in `Table`. Other columns are ignored.
        batch_size: global, samples of all ranks together.

    Raises:
        ConfigError: a column is missing, or a table cannot have one of the values.
    """
    import polars as pl  # takes longer to load than most plans to make

    rows = frame if isinstance(frame, pl.DataFrame) else pl.DataFrame(frame)
    if missing := [column for column in FRAME_COLUMNS if column not in rows.columns]:
        raise ConfigError(
            f"the frame has no column {', '.join(missing)}; it needs {', '.join(FRAME_COLUMNS)}"
        )
    profile = {"reuse_histogram"} & {*rows.columns}
    chosen = rows.select(*FRAME_COLUMNS, *profile).iter_rows(named=True)
    tables = tuple(Table(**row) for row in chosen)
    return ShardingTask(tables, topology, batch_size)
