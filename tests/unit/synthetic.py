"""Synthetic tables, tasks and plans, for the tests of several packages."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dlrm_sharded.datasets.presets import mlperf_dcnv2
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology

USED_ONCE = (1.0, *(0.0,) * (NUM_REUSE_BINS - 1))
"""Reuse histogram of ids that all differ."""

ROWS, IDS = st.integers(1, 5000), st.sampled_from([0.0, 0.5, 1.0, 20.5, 100.0])


def tables_of(*shapes: tuple[Any, ...]) -> tuple[Table, ...]:
    """Return tables t0, t1, ... with these rows, columns, ids of a sample, and histograms."""
    return tuple(Table(f"t{i}", *shape) for i, shape in enumerate(shapes))


def task_of(
    tables: Iterable[Table],
    world_size: int = 2,
    memory_bytes: int = 10**9,
    batch_size: int = 1024,
    *,
    device: str = "cpu",
    **topology: Any,
) -> ShardingTask:
    """Return a task on ranks with these further figures of a topology."""
    ranks = Topology(world_size, memory_bytes, compute_device=device, **topology)
    return ShardingTask(tuple(tables), ranks, batch_size)


def mlperf_task(world_size: int, memory_gib: int = 56) -> ShardingTask:
    """Return MLPerf's tables on hosts of 8 GPUs."""
    ranks = {"local_world_size": min(world_size, 8), "optimizer_bytes_per_row": 4}
    return task_of(mlperf_dcnv2(), world_size, memory_gib * GIB, 55_296, device="cuda", **ranks)


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
    return ShardingPlan.from_ranks(task, ranks)


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


@st.composite
def packed_tasks(
    draw: st.DrawFn,
    memory_ratio: st.SearchStrategy[float],
    *,
    rows: st.SearchStrategy[int] = ROWS,
    most_tables: int = 8,
    hosts: Sequence[tuple[int, int]] = tuple((1, ranks) for ranks in range(1, 6)),
) -> ShardingTask:
    """Draw tasks whose ranks have `memory_ratio` times their share, all alike or each its own.

    Args:
        hosts: numbers of hosts, and of ranks on each.
    """
    shape = st.tuples(rows, st.integers(1, 24).map(lambda n: 4 * n), IDS)
    tables = tables_of(*draw(st.lists(shape, min_size=1, max_size=most_tables)))
    num_hosts, per_host = draw(st.sampled_from(hosts))
    world_size, state = num_hosts * per_host, draw(st.sampled_from([0, 4]))
    size = sum(table.num_embeddings * (4 * table.embedding_dim + state) for table in tables)
    memory = memory_ratio.map(lambda times: int(times * size / world_size) + 1)
    ranks = {
        "local_world_size": per_host,
        "optimizer_bytes_per_row": state,
        "memory_bytes_by_rank": draw(st.none() | st.tuples(*[memory] * world_size)),
    }
    return task_of(tables, world_size, draw(memory), 64, **ranks)
