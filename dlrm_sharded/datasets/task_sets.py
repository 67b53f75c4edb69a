"""Sets of seeded tasks to compare sharders on: the papers', published models', large, small ones.

Tables come from `dlrm_datasets_pool`, but for those of models, and have no reuse histograms: cost
models assume what they need.
Ranks are CPUs, as those of the packaged cost models. A task depends on the seed and its number in
the set alone, so a longer set begins with a shorter one.
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
PAPER_MOST_BYTES = 15_000_000_000

FEASIBILITY_KINDS = (
    *("roomy",) * 9,
    *("large_columns",) * 2,
    *("large_rows",) * 2,
    *("nearly_full",) * 3,
    *("nearly_full_large",) * 2,
    *("infeasible",) * 2,
)
"""In turn. `roomy`: a fifth to four fifths of the memory are taken, and no table is larger than a
rank. `large_columns`: some tables are, and their columns can be split. `large_rows`: some have so
many rows that four columns of all of them fit no rank; only their rows can be split. `nearly_full`:
90 to 99 % of all memory is taken, in `nearly_full_large` with tables of either large kind.
`infeasible`: the tables take more than there is."""

LARGE_PIECE = 0.4
"""Of a rank's memory, that its piece of a large table takes at most: there is room for two."""

LARGE_ROWS = (1.05, 1.2)
"""Memory of four columns of all rows of a table whose rows must be split, over that of a rank."""

SCALE_SIZES = ((400, 32), (1000, 128), (10_000, 1024))
"""Tables, ranks."""

SCALE_FULL = 0.7
SCALE_LARGEST = 0.5
"""Of a rank's memory, that a table of `scale_whole_tasks` takes at most."""

RANKS_PER_HOST = 8
HOST_BYTES_PER_S = 1.25e9
"""Of one rank to other hosts: 10 Gbit/s."""

MEASURED_BATCH_SIZE = 8192
MEASURED_WORLD_SIZE = 4
MEASURED_IDS = 100.0
MEASURED_RANK_BYTES = 3 * GIB
MEASURED_FULL = (0.6, 0.9)
MEASURED_LARGEST = 0.75

MODELS: dict[str, Callable[[], Tables]] = {
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
MODELS_FULL = (0.4, 0.8)
MODELS_LARGEST = 0.8


@dataclass(frozen=True, slots=True)
class TaskOfSet:
    """A task, and what it is.

    Args:
        witness: a plan that can be trained: proof that there is one; None where nobody knows.
    """

    kind: str
    task: ShardingTask
    witness: ShardingPlan | None = None


def paper_tasks(seed: int = 0, *, num: int = 100) -> list[TaskOfSet]:
    """NeuroShard's (arXiv:2305.01868, sec. 4): 10 to 59 tables, 4 ranks of 4 GiB, under 15 GB.

    Its generator draws from Meta's tables; here they are those of `dlrm_datasets_pool`.
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
            if task.table_bytes < PAPER_MOST_BYTES:
                break
        tasks.append(TaskOfSet("paper", task))
    return tasks


def feasibility_tasks(seed: int = 0, *, num: int = 300) -> list[TaskOfSet]:
    """4 to 32 ranks of 4 or 8 GiB, 10 to 400 tables, in turn of each of `FEASIBILITY_KINDS`.

    Made around a plan, their witness, by changing the tables' rows; infeasible ones have none.
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


def scale_tasks(seed: int = 0, *, num: int = len(SCALE_SIZES)) -> list[TaskOfSet]:
    """Ever larger ones (`SCALE_SIZES`) on ranks that are 70 % full; many tables fit no rank."""
    return _scale_tasks(seed, num, largest=None)


def scale_whole_tasks(seed: int = 0, *, num: int = len(SCALE_SIZES)) -> list[TaskOfSet]:
    """The same with fewer rows where a table would take over half a rank: none has to be split."""
    return _scale_tasks(seed, num, largest=SCALE_LARGEST)


def measured_tasks(seed: int = 0, *, num: int = 40) -> list[TaskOfSet]:
    """10 to 40 tables on 4 ranks, small enough to measure each rank on a laptop.

    At most 100 ids per sample and 3 GiB a rank, of which 60 to 90 % are taken; no table is larger
    than three quarters of a rank. The papers' tables with fewer ids, and rows where needed.
    """
    pool = dlrm_datasets_pool()
    tasks = []
    for number in range(num):
        rng = np.random.default_rng([seed, number])
        tables = _draw(pool, int(rng.integers(10, 41)), rng)
        ids_factor = min(1.0, MEASURED_IDS / sum(table.pooling_factor for table in tables))
        tables = tuple(
            dataclasses.replace(table, pooling_factor=ids_factor * table.pooling_factor)
            for table in tables
        )
        full = rng.uniform(*MEASURED_FULL)
        most = int(full * MEASURED_WORLD_SIZE * MEASURED_RANK_BYTES)
        tables = _scaled(tables, min(1.0, most / _bytes(tables)))
        task = _filled(tables, MEASURED_WORLD_SIZE, MEASURED_BATCH_SIZE, full, MEASURED_LARGEST)
        tasks.append(TaskOfSet("measured", task))
    return tasks


def models_tasks(
    seed: int = 0,
    *,
    num: int = len(MODELS) * len(MODELS_WORLD_SIZES) * len(MODELS_BATCH_SIZES),
) -> list[TaskOfSet]:
    """The demo and published models on 2, 4 and 8 ranks at two batch sizes; the kind is its name.

    Tables take 40 to 80 % of the memory, and none more than 80 % of a rank's.
    """
    cases = list(itertools.product(MODELS_BATCH_SIZES, MODELS_WORLD_SIZES, MODELS.items()))
    tasks = []
    for number in range(num):
        batch_size, world_size, (name, tables_of) = cases[number % len(cases)]
        rng = np.random.default_rng([seed, number])
        tables = tables_of()
        largest_bytes = max(_bytes([table]) for table in tables)
        shared_bytes = _bytes(tables) / (rng.uniform(*MODELS_FULL) * world_size)
        topology = Topology(
            world_size,
            int(max(shared_bytes, largest_bytes / MODELS_LARGEST)) + 1,
            local_world_size=world_size,
            compute_device="cpu",
        )
        tasks.append(TaskOfSet(name, ShardingTask(tables, topology, batch_size)))
    return tasks


TASK_SETS: dict[str, Callable[..., list[TaskOfSet]]] = {
    "paper": paper_tasks,
    "feasibility": feasibility_tasks,
    "scale": scale_tasks,
    "scale_whole": scale_whole_tasks,
    "measured": measured_tasks,
    "models": models_tasks,
}
"""All are called with a seed and, by keyword, `num`."""


def _draw(pool: Sequence[Table], num_tables: int, rng: np.random.Generator) -> Tables:
    return draw_tables(pool, num_tables=num_tables, seed=int(rng.integers(2**32)))


def _bytes(tables: Sequence[Table]) -> int:
    """Of the weights alone, as `Topology` counts them by default."""
    return sum(4 * table.num_embeddings * table.embedding_dim for table in tables)


def _with_rows(table: Table, num_rows: float) -> Table:
    return dataclasses.replace(table, num_embeddings=max(1, int(num_rows)))


def _scaled(tables: Sequence[Table], factor: float) -> Tables:
    """All tables with `factor` times the rows."""
    return tuple(_with_rows(table, table.num_embeddings * factor) for table in tables)


def _scale_tasks(seed: int, num: int, *, largest: float | None) -> list[TaskOfSet]:
    pool = dlrm_datasets_pool()
    tasks = []
    for number, (num_tables, world_size) in enumerate(SCALE_SIZES[:num]):
        tables = _draw(pool, num_tables, np.random.default_rng([seed, number]))
        task = _filled(tables, world_size, PAPER_BATCH_SIZE, SCALE_FULL, largest)
        tasks.append(TaskOfSet(f"{num_tables} tables, {world_size} ranks", task))
    return tasks


def _filled(
    tables: Tables, world_size: int, batch_size: int, full: float, largest: float | None
) -> ShardingTask:
    """A task whose tables take the share `full` of the memory.

    Args:
        largest: no table takes more than this share of one rank's memory; None for any size.
    """
    memory_bytes = int(_bytes(tables) / (full * world_size))
    while largest is not None:
        most = largest * memory_bytes
        tables = tuple(
            _with_rows(t, min(t.num_embeddings, most // (4 * t.embedding_dim))) for t in tables
        )
        needed = int(_bytes(tables) / (full * world_size))
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


def _feasibility_task(kind: str, pool: Sequence[Table], rng: np.random.Generator) -> TaskOfSet:
    world_size = int(rng.choice([4, 8, 16, 32]))
    on_hosts = world_size > RANKS_PER_HOST and rng.random() < 0.5
    topology = Topology(
        world_size,
        int(rng.choice([4, 8])) * GIB,
        local_world_size=RANKS_PER_HOST if on_hosts else world_size,
        compute_device="cpu",
        inter_host_bytes_per_s=HOST_BYTES_PER_S if on_hosts else None,
    )
    # a whole table for every rank, so that each can be filled
    least = max(10, 2 * world_size)
    num_tables = round(least * (400 / least) ** rng.random())
    if kind == "roomy":
        num_tables = round(10 * 40 ** rng.random())
    tables = list(_draw(pool, num_tables, rng))
    full = rng.uniform(*((0.9, 0.99) if kind.startswith("nearly_full") else (0.2, 0.8)))
    shards: list[Shard] = []
    if "large" in kind:
        for i in rng.permutation(num_tables)[: rng.integers(1, 3)].tolist():
            by_rows = kind == "large_rows" or (kind != "large_columns" and rng.random() < 0.5)
            split = _split_by_rows if by_rows else _split_by_columns
            tables[i], of_table = split(tables[i], topology, rng)
            shards += of_table
    in_parts = {shard.table for shard in shards}
    used = ShardingPlan(world_size, tuple(shards)).bytes_by_rank(topology)
    whole = [i for i, table in enumerate(tables) if table.name not in in_parts]
    rank_of = dict(zip(whole, rng.permutation(len(whole)) % world_size, strict=True))
    for rank in range(world_size):
        on_rank = [i for i in whole if rank_of[i] == rank]
        left = full * topology.memory_bytes - used[rank]
        factor = max(left, 0) / max(_bytes([tables[i] for i in on_rank]), 1)
        for i in on_rank:
            tables[i] = _with_rows(tables[i], factor * tables[i].num_embeddings)
            shards.append(Shard.whole(tables[i], int(rank)))
    task = ShardingTask(tuple(tables), topology, PAPER_BATCH_SIZE)
    if kind == "infeasible":
        beyond = rng.uniform(1.01, 1.5) * world_size * topology.memory_bytes / _bytes(tables)
        more = tuple(_with_rows(t, 1 + beyond * t.num_embeddings) for t in tables)
        return TaskOfSet(kind, dataclasses.replace(task, tables=more))
    return TaskOfSet(kind, task, ShardingPlan(world_size, tuple(shards)))


def _split_by_columns(
    table: Table, topology: Topology, rng: np.random.Generator
) -> tuple[Table, list[Shard]]:
    """Larger than a rank, and pieces of its columns on ranks of their own."""
    dim = int(rng.choice([32, 64, 128]))
    pieces = int(rng.choice([n for n in (4, 8) if n <= min(topology.world_size, dim // 4)]))
    # two such tables leave room on each rank
    size = rng.uniform(1.1, LARGE_PIECE * pieces) * topology.memory_bytes
    table = dataclasses.replace(table, num_embeddings=int(size) // (4 * dim), embedding_dim=dim)
    width = dim // pieces
    ranks = rng.permutation(topology.world_size)[:pieces].tolist()
    rows = (0, table.num_embeddings)
    return table, [
        Shard(table.name, rank, rows, (i * width, (i + 1) * width)) for i, rank in enumerate(ranks)
    ]


def _split_by_rows(
    table: Table, topology: Topology, rng: np.random.Generator
) -> tuple[Table, list[Shard]]:
    """More rows than any rank holds four columns of, in blocks on all ranks."""
    most_cols = LARGE_PIECE * topology.world_size * COLUMN_MULTIPLE / LARGE_ROWS[1]
    dim = int(rng.choice([dim for dim in (4, 8, 16, 32) if dim <= most_cols]))
    num_rows = int(rng.uniform(*LARGE_ROWS) * topology.memory_bytes / (4 * COLUMN_MULTIPLE))
    table = dataclasses.replace(table, num_embeddings=num_rows, embedding_dim=dim)
    return table, RowBlocks(range(topology.world_size)).shards(table)
