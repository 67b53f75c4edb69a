"""Made-up tables, tasks and plans, as the tests of several rooms take them."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dlrm_sharded.plans.plan import Shard, ShardingPlan, whole_tables
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

USED_ONCE = (1.0, *(0.0,) * (NUM_REUSE_BINS - 1))
"""Reuse histogram of ids that all differ."""


def tables_of(*shapes: tuple[Any, ...]) -> tuple[Table, ...]:
    """Return tables t0, t1, ... with these rows, columns, ids of a sample, and histograms."""
    return tuple(Table(f"t{i}", *shape) for i, shape in enumerate(shapes))


def task_of(
    tables: Iterable[Table],
    world_size: int = 2,
    memory_bytes: int = 10**9,
    batch_size: int = 1024,
    **topology: Any,
) -> ShardingTask:
    """Return a task on CPUs, unless the topology says otherwise."""
    topology = {"compute_device": "cpu", **topology}
    return ShardingTask(tuple(tables), Topology(world_size, memory_bytes, **topology), batch_size)


def with_topology(task: ShardingTask, **changes: Any) -> ShardingTask:
    """Return the task on ranks of which some figures differ."""
    return dataclasses.replace(task, topology=dataclasses.replace(task.topology, **changes))


def with_memory(task: ShardingTask, *memory_bytes: int) -> ShardingTask:
    """Return the task with so much memory on all ranks, or on each."""
    by_rank = memory_bytes if len(memory_bytes) > 1 else None
    return with_topology(task, memory_bytes=min(memory_bytes), memory_bytes_by_rank=by_rank)


def in_turns(task: ShardingTask) -> ShardingPlan:
    """Place whole tables on one rank after the other."""
    ranks = [i % task.topology.world_size for i in range(len(task.tables))]
    return whole_tables(task, ranks)


def column_shards(table: Table, *pieces: tuple[int, int]) -> list[Shard]:
    """Cut a table from left to right into pieces, each given by its rank and its width."""
    shards, start = [], 0
    for rank, width in pieces:
        shards.append(Shard(table.name, rank, (0, table.num_embeddings), (start, start + width)))
        start += width
    return shards


def assert_same_arrays(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Compare arrays by name, to the last bit."""
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
