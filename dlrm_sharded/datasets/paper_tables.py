"""The tasks behind tables of results in papers, as far as their inputs are public.

The papers draw from Meta's dlrm_datasets, these functions from `dlrm_datasets_pool`, which has the
same statistics. Numbers of tables, widths, memory and batch are those of the authors' code
(daochenzha/neuroshard, dreamshard and autoshard on GitHub). Ranks are GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dlrm_sharded.datasets.benchmark_task import RANKS_PER_HOST, BenchmarkTask, draw
from dlrm_sharded.datasets.presets import PAPER_DIMS, dlrm_datasets_pool
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology

PAPER_BATCH_SIZE = 65_536
PAPER_NUM_TABLES = (10, 59)
PAPER_WORLD_SIZE, PAPER_MEMORY_BYTES = 4, 4 * GIB
SPARE_BYTES = 1_000_000_000
"""This much stays free if tables share 4 GB per rank: they take 15 GB on 4 ranks, 31 GB on 8."""

NEUROSHARD_SIZES = ((4, PAPER_NUM_TABLES), (8, (20, 119)))
"""Numbers of GPUs and of tables in NeuroShard's Table 1."""

DREAMSHARD_NUM_TABLES, DREAMSHARD_DIM, DREAMSHARD_GB = (20, 40, 60, 80, 100), 16, 5
AUTOSHARD_NUM_TABLES, AUTOSHARD_DIMS, AUTOSHARD_GB = 80, (16, 32), 7
GB = 10**9


def drawn_task(
    kind: str,
    rng: np.random.Generator,
    topology: Topology,
    num_tables: tuple[int, int],
    *,
    dims: Sequence[int] = PAPER_DIMS,
) -> BenchmarkTask:
    """Draw a task like NeuroShard's (arXiv:2305.01868, sec. 4), until its tables are small enough.

    Args:
        num_tables: smallest and largest number of tables.
    """
    pool = dlrm_datasets_pool()
    drawn = int(rng.integers(num_tables[0], num_tables[1] + 1))
    max_bytes = 4 * GB * topology.world_size - SPARE_BYTES
    while True:
        task = ShardingTask(draw(pool, drawn, rng, dims), topology, PAPER_BATCH_SIZE)
        if task.table_bytes < max_bytes:
            return BenchmarkTask(kind, task)


def neuroshard_table_1(seed: int = 0, *, num: int = 120) -> list[BenchmarkTask]:
    """Return tasks of NeuroShard's Table 1: 4 and 8 GPUs, widths of at most 4, 8, ... 128.

    The paper has 100 tasks of each of the 12 kinds.
    """
    kinds = [(ranks, tables, dim) for ranks, tables in NEUROSHARD_SIZES for dim in PAPER_DIMS]
    tasks = []
    for number in range(num):
        num_gpus, num_tables, max_dim = kinds[number % len(kinds)]
        tasks.append(
            drawn_task(
                f"{num_gpus} GPUs, widths to {max_dim}",
                np.random.default_rng([seed, number]),
                _gpus(num_gpus, PAPER_MEMORY_BYTES),
                num_tables,
                dims=[dim for dim in PAPER_DIMS if dim <= max_dim],
            )
        )
    return tasks


def neuroshard_table_2(seed: int = 0, *, num: int = 20) -> list[BenchmarkTask]:
    """Return tasks of NeuroShard's ablation: 4 GPUs, widths of at most 128; the paper has 100."""
    ranks = _gpus(PAPER_WORLD_SIZE, PAPER_MEMORY_BYTES)
    return [
        drawn_task("4 GPUs", np.random.default_rng([seed, number]), ranks, PAPER_NUM_TABLES)
        for number in range(num)
    ]


def dreamshard_table_1(seed: int = 0, *, num: int = 50) -> list[BenchmarkTask]:
    """Return tasks of DreamShard's Table 1 (arXiv:2210.02023) on 4 GPUs of 5 GB.

    DLRM-20 to DLRM-100 have 20 to 100 distinct tables of 16 columns; the paper has 50 tasks of
    each.
    """
    ranks = _gpus(4, DREAMSHARD_GB * GB)
    sizes = [DREAMSHARD_NUM_TABLES[number % len(DREAMSHARD_NUM_TABLES)] for number in range(num)]
    return [
        _distinct(f"DLRM-{size} (4)", [seed, number], ranks, size, (DREAMSHARD_DIM,))
        for number, size in enumerate(sizes)
    ]


def autoshard_synthetic(seed: int = 0, *, num: int = 20) -> list[BenchmarkTask]:
    """Return tasks as AutoShard's code draws them: 80 tables of 16 or 32 columns, 8 GPUs of 7 GB.

    The code counts two bytes a weight; these tasks count four.
    """
    ranks = _gpus(RANKS_PER_HOST, AUTOSHARD_GB * GB)
    return [
        _distinct("autoshard", [seed, number], ranks, AUTOSHARD_NUM_TABLES, AUTOSHARD_DIMS)
        for number in range(num)
    ]


PAPER_SETS: dict[str, Callable[..., list[BenchmarkTask]]] = {
    "neuroshard_table_1": neuroshard_table_1,
    "neuroshard_table_2": neuroshard_table_2,
    "dreamshard_table_1": dreamshard_table_1,
    "autoshard_synthetic": autoshard_synthetic,
}
"""Functions by name of the set, as in `TASK_SETS`."""


def _gpus(world_size: int, memory_bytes: int) -> Topology:
    return Topology(world_size, memory_bytes, local_world_size=min(world_size, RANKS_PER_HOST))


def _distinct(
    kind: str, seed: Sequence[int], topology: Topology, num_tables: int, dims: Sequence[int]
) -> BenchmarkTask:
    """Draw tables from the pool without replacement, as DreamShard and AutoShard do."""
    pool, rng = dlrm_datasets_pool(), np.random.default_rng(seed)
    places = rng.choice(len(pool), size=num_tables, replace=False)
    widths = rng.choice(dims, size=num_tables)
    tables = tuple(
        dataclasses.replace(pool[place], embedding_dim=int(width))
        for place, width in zip(places, widths, strict=True)
    )
    return BenchmarkTask(kind, ShardingTask(tables, topology, PAPER_BATCH_SIZE))
