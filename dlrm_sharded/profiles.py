"""Access profiles of tables that were not measured: the expectation of a Zipf distribution."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask
from dlrm_sharded.zipf import cached_zipf

ASSUMED_EXPONENT = 0.9
"""Zipf exponent that is assumed for tables without a profile; it fits Meta's dlrm_datasets best."""


def with_profiles(task: ShardingTask) -> ShardingTask:
    """Return the task with an assumed reuse histogram for every table that has none."""
    unknown = [table for table in task.tables if table.reuse_histogram is None]
    assumed = with_expected_profile(unknown, batch_size=task.batch_size, exponent=ASSUMED_EXPONENT)
    by_name = {table.name: table for table in assumed}
    tables = tuple(by_name.get(table.name, table) for table in task.tables)
    return ShardingTask(tables, task.topology, task.batch_size)


def with_expected_profile(
    tables: Iterable[Table], *, batch_size: int, exponent: float
) -> tuple[Table, ...]:
    """Return the tables with the expected reuse histogram of a Zipf-distributed global batch."""
    return tuple(
        dataclasses.replace(
            table,
            reuse_histogram=_expected_reuse_histogram(
                table.num_embeddings, exponent, batch_size * table.pooling_factor
            ),
        )
        for table in tables
    )


@functools.lru_cache(maxsize=65_536)
def _expected_reuse_histogram(num_ids: int, exponent: float, num_draws: float) -> tuple[float, ...]:
    return cached_zipf(num_ids, exponent).expected_reuse_histogram(num_draws)
