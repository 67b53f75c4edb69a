"""Sets of random tasks on which sharders are compared.

Tables are drawn from `dlrm_datasets_pool`, except those of published models. They have no reuse
histograms; cost models assume some. Ranks are CPUs, for which the package has cost models. A task
depends only on the seed and its number in the set, so that a longer set begins with a shorter one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

from dlrm_sharded.datasets.benchmark_task import (
    RANKS_PER_HOST,
    BenchmarkTask,
    cpu_ranks,
    draw,
    with_rows,
)
from dlrm_sharded.datasets.feasibility_tasks import feasibility_tasks
from dlrm_sharded.datasets.paper_tables import (
    PAPER_BATCH_SIZE,
    PAPER_MEMORY_BYTES,
    PAPER_NUM_TABLES,
    PAPER_SETS,
    PAPER_WORLD_SIZE,
    drawn_task,
)
from dlrm_sharded.datasets.presets import (
    Tables,
    criteo_kaggle,
    dlrm_datasets_pool,
    embedding_demo,
    mlperf_dcnv2,
    num_bytes,
    nvidia_small,
    nvidia_tiny,
    rm1,
    rm2,
    rm3,
    t510,
)
from dlrm_sharded.plans.task import GIB, ShardingTask

SCALE_SIZES = ((400, 32), (1000, 128), (10_000, 1024))
"""Numbers of tables and of ranks of `scale_tasks`."""

PRODUCTION_SIZE = (1000, 128)
"""Numbers of tables and of ranks of `production_tasks`."""

SCALE_MEMORY_USE = 0.7
SCALE_MAX_TABLE_SHARE = 0.5
"""Largest share of a rank's memory for a table of the set `scale_whole`."""

MEASURED_BATCH_SIZE = 8192
MEASURED_WORLD_SIZE = 4
MEASURED_MAX_IDS = 100.0
MEASURED_RANK_BYTES = 3 * GIB
MEASURED_MEMORY_USE = (0.6, 0.9)
MEASURED_MAX_TABLE_SHARE = 0.75

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


def paper_tasks(seed: int = 0, *, num: int = 100) -> list[BenchmarkTask]:
    """Return tasks like NeuroShard's (arXiv:2305.01868, sec. 4): 10 to 59 tables, 4 ranks of 4 GiB.

    The tables take less than 15 GB. The paper draws from Meta's tables, this function from
    `dlrm_datasets_pool`.
    """
    ranks = cpu_ranks(PAPER_WORLD_SIZE, PAPER_MEMORY_BYTES)
    return [
        drawn_task("paper", np.random.default_rng([seed, number]), ranks, PAPER_NUM_TABLES)
        for number in range(num)
    ]


def scale_tasks(
    seed: int = 0, *, num: int = len(SCALE_SIZES), max_table_share: float | None = None
) -> list[BenchmarkTask]:
    """Return tasks of `SCALE_SIZES` that take 70 % of the memory; many tables do not fit a rank.

    Args:
        max_table_share: largest share of a rank's memory that a table takes; None for any size.
            With `SCALE_MAX_TABLE_SHARE`, which is 0.5, no table has to be split.
    """
    return [
        BenchmarkTask(
            f"{num_tables} tables, {world_size} ranks",
            _scaling_task(
                num_tables, world_size, np.random.default_rng([seed, number]), max_table_share
            ),
        )
        for number, (num_tables, world_size) in enumerate(SCALE_SIZES[:num])
    ]


def production_tasks(seed: int = 0, *, num: int = 1) -> list[BenchmarkTask]:
    """Return stand-ins for the model of NeuroShard's Table 3, whose tables are not public.

    They are like the tasks of `scale_whole`, on 128 GPUs of 16 hosts.
    """
    tasks = []
    for number in range(num):
        rng = np.random.default_rng([seed, number])
        task = _scaling_task(*PRODUCTION_SIZE, rng, SCALE_MAX_TABLE_SHARE)
        gpus = dataclasses.replace(
            task.topology, compute_device="cuda", inter_host_bytes_per_s=None
        )
        tasks.append(BenchmarkTask("production", dataclasses.replace(task, topology=gpus)))
    return tasks


def measured_tasks(seed: int = 0, *, num: int = 40) -> list[BenchmarkTask]:
    """Return tasks with 10 to 40 tables on a few ranks, small enough to measure on a laptop.

    All tables together are cut to at most 100 ids per sample, and to ranks of at most 3 GiB. They
    take 60 to 90 % of the memory, and no table takes more than three quarters of a rank.
    """
    pool = dlrm_datasets_pool()
    tasks = []
    for number in range(num):
        rng = np.random.default_rng([seed, number])
        tables = draw(pool, int(rng.integers(10, 41)), rng)
        memory_use = rng.uniform(*MEASURED_MEMORY_USE)
        max_bytes = int(memory_use * MEASURED_WORLD_SIZE * MEASURED_RANK_BYTES)
        task = _fitted_task(
            _cut(tables, max_ids=MEASURED_MAX_IDS, max_bytes=max_bytes),
            MEASURED_WORLD_SIZE,
            MEASURED_BATCH_SIZE,
            memory_use,
            MEASURED_MAX_TABLE_SHARE,
        )
        tasks.append(BenchmarkTask("measured", task))
    return tasks


def models_tasks(
    seed: int = 0,
    *,
    num: int = len(PUBLISHED_MODELS) * len(MODELS_WORLD_SIZES) * len(MODELS_BATCH_SIZES),
) -> list[BenchmarkTask]:
    """Return `PUBLISHED_MODELS` on 2, 4 and 8 ranks at two batch sizes.

    Tables take 40 to 80 % of the memory, or less if a table would take more than 80 % of a rank.
    """
    cases = list(
        itertools.product(MODELS_BATCH_SIZES, MODELS_WORLD_SIZES, PUBLISHED_MODELS.items())
    )
    tasks = []
    for number in range(num):
        batch_size, world_size, (name, preset) = cases[number % len(cases)]
        rng = np.random.default_rng([seed, number])
        tables = preset()
        largest_bytes = max(num_bytes([table]) for table in tables)
        rank_bytes = num_bytes(tables) / (rng.uniform(*MODELS_MEMORY_USE) * world_size)
        memory_bytes = int(max(rank_bytes, largest_bytes / MODELS_MAX_TABLE_SHARE)) + 1
        topology = cpu_ranks(world_size, memory_bytes)
        tasks.append(BenchmarkTask(name, ShardingTask(tables, topology, batch_size)))
    return tasks


TASK_SETS: dict[str, Callable[..., list[BenchmarkTask]]] = {
    "paper": paper_tasks,
    "feasibility": feasibility_tasks,
    "scale": scale_tasks,
    "scale_whole": functools.partial(scale_tasks, max_table_share=SCALE_MAX_TABLE_SHARE),
    "measured": measured_tasks,
    "models": models_tasks,
    **PAPER_SETS,
    "neuroshard_table_3": production_tasks,
}
"""Functions by name of their set; all take a seed and, by keyword, the number of tasks `num`."""


def _scaling_task(
    num_tables: int, world_size: int, rng: np.random.Generator, max_table_share: float | None
) -> ShardingTask:
    tables = draw(dlrm_datasets_pool(), num_tables, rng)
    return _fitted_task(tables, world_size, PAPER_BATCH_SIZE, SCALE_MEMORY_USE, max_table_share)


def _cut(tables: Tables, *, max_ids: float, max_bytes: float) -> Tables:
    """Scale the tables' ids per sample and rows down in proportion, if their totals are larger."""
    ids_factor = min(1.0, max_ids / sum(table.pooling_factor for table in tables))
    rows_factor = min(1.0, max_bytes / num_bytes(tables))
    return tuple(
        dataclasses.replace(
            with_rows(table, table.num_embeddings * rows_factor),
            pooling_factor=ids_factor * table.pooling_factor,
        )
        for table in tables
    )


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
        max_table_share: larger tables are cut to this share of a rank's memory; None cuts none.
    """
    memory_bytes = int(num_bytes(tables) / (memory_use * world_size))
    # cutting tables reduces the memory, which may require further cuts
    while max_table_share is not None:
        max_bytes = max_table_share * memory_bytes
        tables = tuple(
            with_rows(t, min(t.num_embeddings, max_bytes // (4 * t.embedding_dim))) for t in tables
        )
        needed = int(num_bytes(tables) / (memory_use * world_size))
        if needed == memory_bytes:
            break
        memory_bytes = needed
    topology = cpu_ranks(world_size, memory_bytes, on_hosts=world_size > 8 * RANKS_PER_HOST)
    return ShardingTask(tables, topology, batch_size)
