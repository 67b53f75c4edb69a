"""Sets of random tasks on which sharders are compared.

Tables are drawn from `dlrm_datasets_pool`, except those of published models. They have no reuse
histograms; cost models assume them. Ranks are CPUs, for which the package has cost models. A task
depends only on the seed and its number in the set, so that a longer set begins with a shorter one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.datasets.presets import (
    Tables,
    criteo_kaggle,
    dlrm_datasets_pool,
    draw_tables,
    embedding_demo,
    mlperf_dcnv2,
    nvidia_small,
    nvidia_tiny,
    rm1,
    rm2,
    rm3,
    t510,
)
from dlrm_sharded.layouts import RowBlocks
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import GIB, ShardingTask, Topology

PAPER_BATCH_SIZE = 65_536
PAPER_NUM_TABLES = (10, 59)
PAPER_WORLD_SIZE, PAPER_MEMORY_BYTES = 4, 4 * GIB
PAPER_MAX_BYTES = 15_000_000_000

FEASIBILITY_KINDS = (
    *("roomy",) * 9,
    *("large_columns",) * 2,
    *("large_rows",) * 2,
    *("nearly_full",) * 3,
    *("nearly_full_large",) * 2,
    *("infeasible",) * 2,
)
"""Kinds of `feasibility_tasks`, which take turns:
`roomy`: tables take 20 to 80 % of the memory, and none is larger than a rank.
`large_columns`: some tables are larger than a rank, and their columns can be split.
`large_rows`: some tables have so many rows that four columns of all rows fit no rank, so that only
their rows can be split.
`nearly_full`, `nearly_full_large`: tables take 90 to 99 % of the memory, the latter with tables of
either large kind.
`infeasible`: the tables are larger than the memory of all ranks."""

MAX_PIECE_SHARE = 0.4
"""Largest share of a rank's memory for a piece of a large table; a rank has room for two."""

LARGE_ROWS = (1.05, 1.2)
"""Range of the size of four columns of a `large_rows` table, relative to a rank's memory."""

SCALE_SIZES = ((400, 32), (1000, 128), (10_000, 1024))
"""Numbers of tables and of ranks of `scale_tasks`."""

SCALE_MEMORY_USE = 0.7
SCALE_MAX_TABLE_SHARE = 0.5
"""Largest share of a rank's memory for a table of `scale_whole_tasks`."""

RANKS_PER_HOST = 8
HOST_BYTES_PER_S = 1.25e9
"""Bandwidth of one rank to other hosts: 10 Gbit/s."""

MEASURED_BATCH_SIZE = 8192
MEASURED_WORLD_SIZE = 4
MEASURED_MAX_IDS = 100.0
MEASURED_RANK_BYTES = 3 * GIB
MEASURED_MEMORY_USE = (0.6, 0.9)
MEASURED_MAX_TABLE_SHARE = 0.75

TRAINED_MAX_IDS = 100.0
TRAINED_MEMORY_USE = (0.2, 0.6)
TRAINED_MAX_TABLE_SHARE = 0.3
TRAINED_BATCH_SIZES = (1024, 2048, 4096)

PUBLISHED_MODELS: dict[str, Callable[[], Tables]] = {
    "embedding_demo": embedding_demo,
    "mlperf_dcnv2": mlperf_dcnv2,
    "criteo_kaggle": criteo_kaggle,
    "rm1": rm1,
    "rm2": rm2,
    "rm3": rm3,
    "t510": t510,
    "nvidia_tiny": nvidia_tiny,
    "nvidia_small": nvidia_small,
}
MODELS_WORLD_SIZES = (2, 4, 8)
MODELS_BATCH_SIZES = (2048, 8192)
MODELS_MEMORY_USE = (0.4, 0.8)
MODELS_MAX_TABLE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class BenchmarkTask:
    """A task of a set.

    Args:
        kind: name of the group of tasks within the set.
        witness: a valid plan, which proves that the task is feasible; None if none is known.
    """

    kind: str
    task: ShardingTask
    witness: ShardingPlan | None = None


def paper_tasks(seed: int = 0, *, num: int = 100) -> list[BenchmarkTask]:
    """Return tasks as NeuroShard's (arXiv:2305.01868, sec. 4): 10 to 59 tables, 4 ranks of 4 GiB.

    The tables take less than 15 GB. The paper draws from Meta's tables, this function from
    `dlrm_datasets_pool`.
    """
    pool = dlrm_datasets_pool()
    topology = Topology(
        PAPER_WORLD_SIZE,
        PAPER_MEMORY_BYTES,
        local_world_size=PAPER_WORLD_SIZE,
        compute_device="cpu",
    )
    tasks = []
    for number in range(num):
        rng = np.random.default_rng([seed, number])
        num_tables = int(rng.integers(PAPER_NUM_TABLES[0], PAPER_NUM_TABLES[1] + 1))
        while True:
            tables = _draw(pool, num_tables, rng)
            task = ShardingTask(tables, topology, PAPER_BATCH_SIZE)
            if task.table_bytes < PAPER_MAX_BYTES:
                break
        tasks.append(BenchmarkTask("paper", task))
    return tasks


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


def scale_tasks(seed: int = 0, *, num: int = len(SCALE_SIZES)) -> list[BenchmarkTask]:
    """Return tasks of `SCALE_SIZES` that take 70 % of the memory; many tables fit no rank."""
    return _scale_tasks(seed, num, max_table_share=None)


def scale_whole_tasks(seed: int = 0, *, num: int = len(SCALE_SIZES)) -> list[BenchmarkTask]:
    """Return `scale_tasks` with tables cut to half a rank, so that none has to be split."""
    return _scale_tasks(seed, num, max_table_share=SCALE_MAX_TABLE_SHARE)


def measured_tasks(
    seed: int = 0, *, num: int = 40, world_size: int = MEASURED_WORLD_SIZE
) -> list[BenchmarkTask]:
    """Return tasks with 10 to 40 tables on a few ranks, small enough to measure on a laptop.

    The tables of the papers are cut to at most 100 ids per sample and 3 GiB per rank. They take 60
    to 90 % of the memory, and no table takes more than three quarters of a rank.
    """
    pool = dlrm_datasets_pool()
    tasks = []
    for number in range(num):
        rng = np.random.default_rng([seed, number])
        tables = _draw(pool, int(rng.integers(10, 41)), rng)
        ids_factor = min(1.0, MEASURED_MAX_IDS / sum(table.pooling_factor for table in tables))
        tables = tuple(
            dataclasses.replace(table, pooling_factor=ids_factor * table.pooling_factor)
            for table in tables
        )
        memory_use = rng.uniform(*MEASURED_MEMORY_USE)
        max_bytes = int(memory_use * world_size * MEASURED_RANK_BYTES)
        task = _fitted_task(
            _scaled(tables, min(1.0, max_bytes / _bytes(tables))),
            world_size,
            MEASURED_BATCH_SIZE,
            memory_use,
            MEASURED_MAX_TABLE_SHARE,
        )
        tasks.append(BenchmarkTask("measured", task))
    return tasks


def trained_task(number: int, topology: Topology, *, seed: int = 0) -> ShardingTask:
    """Return a task with 6 to 40 tables that a few CPU ranks train in a fraction of a second.

    The tables are cut to at most 100 ids per sample, and take 20 to 60 % of the memory at most.
    """
    rng = np.random.default_rng([seed, number])
    tables = _draw(dlrm_datasets_pool(), int(rng.integers(6, 41)), rng)
    num_ids = rng.uniform(TRAINED_MAX_IDS / 5, TRAINED_MAX_IDS)
    ids_factor = min(1.0, num_ids / sum(table.pooling_factor for table in tables))
    max_bytes = rng.uniform(*TRAINED_MEMORY_USE) * topology.world_size * topology.memory_bytes
    largest_bytes = TRAINED_MAX_TABLE_SHARE * topology.memory_bytes
    rows_factor = min(1.0, max_bytes / _bytes(tables))
    tables = tuple(
        dataclasses.replace(
            _with_rows(
                table,
                min(table.num_embeddings * rows_factor, largest_bytes / (4 * table.embedding_dim)),
            ),
            pooling_factor=ids_factor * table.pooling_factor,
        )
        for table in tables
    )
    return ShardingTask(tables, topology, int(rng.choice(TRAINED_BATCH_SIZES)))


def models_tasks(
    seed: int = 0,
    *,
    num: int = len(PUBLISHED_MODELS) * len(MODELS_WORLD_SIZES) * len(MODELS_BATCH_SIZES),
) -> list[BenchmarkTask]:
    """Return `PUBLISHED_MODELS` on 2, 4 and 8 ranks at two batch sizes.

    Tables take 40 to 80 % of the memory, and no table takes more than 80 % of a rank.
    """
    cases = list(
        itertools.product(MODELS_BATCH_SIZES, MODELS_WORLD_SIZES, PUBLISHED_MODELS.items())
    )
    tasks = []
    for number in range(num):
        batch_size, world_size, (name, preset) = cases[number % len(cases)]
        rng = np.random.default_rng([seed, number])
        tables = preset()
        largest_bytes = max(_bytes([table]) for table in tables)
        rank_bytes = _bytes(tables) / (rng.uniform(*MODELS_MEMORY_USE) * world_size)
        topology = Topology(
            world_size,
            int(max(rank_bytes, largest_bytes / MODELS_MAX_TABLE_SHARE)) + 1,
            local_world_size=world_size,
            compute_device="cpu",
        )
        tasks.append(BenchmarkTask(name, ShardingTask(tables, topology, batch_size)))
    return tasks


TASK_SETS: dict[str, Callable[..., list[BenchmarkTask]]] = {
    "paper": paper_tasks,
    "feasibility": feasibility_tasks,
    "scale": scale_tasks,
    "scale_whole": scale_whole_tasks,
    "measured": measured_tasks,
    "models": models_tasks,
}
"""Functions by name of the set; all take a seed and, by keyword, the number of tasks `num`."""


def _draw(pool: Sequence[Table], num_tables: int, rng: np.random.Generator) -> Tables:
    return draw_tables(pool, num_tables=num_tables, seed=int(rng.integers(2**32)))


def _bytes(tables: Sequence[Table]) -> int:
    """Return the bytes of the weights, as `Topology` counts them by default."""
    return sum(4 * table.num_embeddings * table.embedding_dim for table in tables)


def _with_rows(table: Table, num_rows: float) -> Table:
    return dataclasses.replace(table, num_embeddings=max(1, int(num_rows)))


def _scaled(tables: Sequence[Table], factor: float) -> Tables:
    """Return the tables with `factor` times the rows."""
    return tuple(_with_rows(table, table.num_embeddings * factor) for table in tables)


def _scale_tasks(seed: int, num: int, *, max_table_share: float | None) -> list[BenchmarkTask]:
    tasks = []
    for number, (num_tables, world_size) in enumerate(SCALE_SIZES[:num]):
        rng = np.random.default_rng([seed, number])
        task = _scaling_task(num_tables, world_size, rng, max_table_share)
        tasks.append(BenchmarkTask(f"{num_tables} tables, {world_size} ranks", task))
    return tasks


def scaling_task(num_tables: int, world_size: int, *, seed: int = 0) -> ShardingTask:
    """Return a task of any size like those of `scale_whole_tasks`."""
    rng = np.random.default_rng([seed, num_tables])
    return _scaling_task(num_tables, world_size, rng, SCALE_MAX_TABLE_SHARE)


def _scaling_task(
    num_tables: int, world_size: int, rng: np.random.Generator, max_table_share: float | None
) -> ShardingTask:
    tables = _draw(dlrm_datasets_pool(), num_tables, rng)
    return _fitted_task(tables, world_size, PAPER_BATCH_SIZE, SCALE_MEMORY_USE, max_table_share)


def _fitted_task(
    tables: Tables,
    world_size: int,
    batch_size: int,
    memory_use: float,
    max_table_share: float | None,
) -> ShardingTask:
    """Return a task whose ranks have as much memory as the tables need.

    Args:
        memory_use: share of all memory that the tables take.
        max_table_share: larger tables are cut to this share of a rank's memory; None for any size.
    """
    memory_bytes = int(_bytes(tables) / (memory_use * world_size))
    # cutting tables reduces the memory, which may mean further cuts
    while max_table_share is not None:
        max_bytes = max_table_share * memory_bytes
        tables = tuple(
            _with_rows(t, min(t.num_embeddings, max_bytes // (4 * t.embedding_dim))) for t in tables
        )
        needed = int(_bytes(tables) / (memory_use * world_size))
        if needed == memory_bytes:
            break
        memory_bytes = needed
    on_hosts = world_size > 8 * RANKS_PER_HOST
    topology = Topology(
        world_size,
        memory_bytes,
        local_world_size=RANKS_PER_HOST if on_hosts else world_size,
        compute_device="cpu",
        inter_host_bytes_per_s=HOST_BYTES_PER_S if on_hosts else None,
    )
    return ShardingTask(tables, topology, batch_size)


def _feasibility_task(kind: str, pool: Sequence[Table], rng: np.random.Generator) -> BenchmarkTask:
    world_size = int(rng.choice([4, 8, 16, 32]))
    on_hosts = world_size > RANKS_PER_HOST and rng.random() < 0.5
    topology = Topology(
        world_size,
        int(rng.choice([4, 8])) * GIB,
        local_world_size=RANKS_PER_HOST if on_hosts else world_size,
        compute_device="cpu",
        inter_host_bytes_per_s=HOST_BYTES_PER_S if on_hosts else None,
    )
    # enough tables that every rank gets a whole one, with which it can be filled
    min_tables = max(10, 2 * world_size)
    num_tables = round(min_tables * (400 / min_tables) ** rng.random())
    if kind == "roomy":
        num_tables = round(10 * 40 ** rng.random())
    tables = list(_draw(pool, num_tables, rng))
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
        factor = max(free, 0) / max(_bytes([tables[i] for i in on_rank]), 1)
        for i in on_rank:
            tables[i] = _with_rows(tables[i], factor * tables[i].num_embeddings)
            shards.append(Shard.whole(tables[i], int(rank)))
    task = ShardingTask(tuple(tables), topology, PAPER_BATCH_SIZE)
    if kind == "infeasible":
        factor = rng.uniform(1.01, 1.5) * world_size * topology.memory_bytes / _bytes(tables)
        too_large = tuple(_with_rows(t, 1 + factor * t.num_embeddings) for t in tables)
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
