"""Random tasks: memory partly or nearly full, tables larger than a rank, or infeasible."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dlrm_sharded.datasets.benchmark_task import (
    RANKS_PER_HOST,
    BenchmarkTask,
    cpu_ranks,
    draw,
    with_rows,
)
from dlrm_sharded.datasets.presets import dlrm_datasets_pool, num_bytes
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology

BATCH_SIZE = 65_536

FEASIBILITY_KINDS = (
    *("partly_full",) * 9,
    *("large_columns",) * 2,
    *("large_rows",) * 2,
    *("nearly_full",) * 3,
    *("nearly_full_large",) * 2,
    *("infeasible",) * 2,
)
"""Kinds of `feasibility_tasks`, in turn:
`partly_full`: tables take 20 to 80 % of the memory, and none is larger than a rank.
`large_columns`: some tables are larger than a rank, and their columns can be split.
`large_rows`: some tables have so many rows that four columns of all rows fit no rank, so that only
their rows can be split.
`nearly_full`, `nearly_full_large`: tables take 90 to 99 % of the memory, the latter with tables of
either large kind.
`infeasible`: the tables are larger than the memory of all ranks."""

MAX_PIECE_SHARE = 0.4
"""Largest share of a rank's memory for a piece of a large table; two fit a rank."""

LARGE_ROWS = (1.05, 1.2)
"""Range of the size of four columns of a `large_rows` table, relative to a rank's memory."""


def feasibility_tasks(seed: int = 0, *, num: int = 300) -> list[BenchmarkTask]:
    """Return tasks with 4 to 32 ranks of 4 or 8 GiB and 10 to 400 tables of `FEASIBILITY_KINDS`.

    Each task is built around a plan, its witness, by changing the rows of the tables; infeasible
    tasks have none.
    """
    pool = dlrm_datasets_pool()
    return [
        _feasibility_task(
            FEASIBILITY_KINDS[number % len(FEASIBILITY_KINDS)],
            pool,
            np.random.default_rng([seed, number]),
        )
        for number in range(num)
    ]


def _feasibility_task(kind: str, pool: Sequence[Table], rng: np.random.Generator) -> BenchmarkTask:
    world_size = int(rng.choice([4, 8, 16, 32]))
    on_hosts = world_size > RANKS_PER_HOST and rng.random() < 0.5
    topology = cpu_ranks(world_size, int(rng.choice([4, 8])) * GIB, on_hosts=on_hosts)
    # enough tables that every rank gets a whole one, which can be resized to fill it
    min_tables = max(10, 2 * world_size)
    num_tables = round(min_tables * (400 / min_tables) ** rng.random())
    if kind == "partly_full":
        num_tables = round(10 * 40 ** rng.random())
    tables = list(draw(pool, num_tables, rng))
    memory_use = rng.uniform(*((0.9, 0.99) if kind.startswith("nearly_full") else (0.2, 0.8)))
    shards: list[Shard] = []
    if "large" in kind:
        for i in rng.permutation(num_tables)[: rng.integers(1, 3)].tolist():
            by_rows = kind == "large_rows" or (kind != "large_columns" and rng.random() < 0.5)
            split = _split_by_rows if by_rows else _split_by_columns
            tables[i], pieces = split(tables[i], topology, rng)
            shards += pieces
    split_tables = {shard.table for shard in shards}
    used = ShardingPlan(world_size, tuple(shards)).bytes_by_rank(topology)
    whole = [i for i, table in enumerate(tables) if table.name not in split_tables]
    rank_by_table = dict(zip(whole, rng.permutation(len(whole)) % world_size, strict=True))
    for rank in range(world_size):
        on_rank = [i for i in whole if rank_by_table[i] == rank]
        free = memory_use * topology.memory_bytes - used[rank]
        factor = max(free, 0) / max(num_bytes([tables[i] for i in on_rank]), 1)
        for i in on_rank:
            tables[i] = with_rows(tables[i], factor * tables[i].num_embeddings)
            shards.append(Shard.whole(tables[i], int(rank)))
    task = ShardingTask(tuple(tables), topology, BATCH_SIZE)
    if kind == "infeasible":
        factor = rng.uniform(1.01, 1.5) * world_size * topology.memory_bytes / num_bytes(tables)
        too_large = tuple(with_rows(t, 1 + factor * t.num_embeddings) for t in tables)
        return BenchmarkTask(kind, dataclasses.replace(task, tables=too_large))
    return BenchmarkTask(kind, task, ShardingPlan(world_size, tuple(shards)))


def _split_by_columns(
    table: Table, topology: Topology, rng: np.random.Generator
) -> tuple[Table, list[Shard]]:
    """Make the table larger than a rank, and put pieces of its columns on different ranks."""
    dim = int(rng.choice([32, 64, 128]))
    num_pieces = int(rng.choice([n for n in (4, 8) if n <= min(topology.world_size, dim // 4)]))
    size = rng.uniform(1.1, MAX_PIECE_SHARE * num_pieces) * topology.memory_bytes
    table = dataclasses.replace(table, num_embeddings=int(size) // (4 * dim), embedding_dim=dim)
    width = dim // num_pieces
    ranks = rng.permutation(topology.world_size)[:num_pieces].tolist()
    rows = (0, table.num_embeddings)
    return table, [
        Shard(table.name, rank, rows, (i * width, (i + 1) * width)) for i, rank in enumerate(ranks)
    ]


def _split_by_rows(
    table: Table, topology: Topology, rng: np.random.Generator
) -> tuple[Table, list[Shard]]:
    """Make four columns of all rows larger than a rank, and put row blocks on all ranks."""
    max_cols = MAX_PIECE_SHARE * topology.world_size * COLUMN_MULTIPLE / LARGE_ROWS[1]
    dim = int(rng.choice([dim for dim in (4, 8, 16, 32) if dim <= max_cols]))
    num_rows = int(rng.uniform(*LARGE_ROWS) * topology.memory_bytes / (4 * COLUMN_MULTIPLE))
    table = dataclasses.replace(table, num_embeddings=num_rows, embedding_dim=dim)
    return table, RowBlocks(range(topology.world_size)).shards(table)
