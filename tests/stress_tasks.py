"""Random stress tasks: few tables on many ranks, of any size, in tight memory.

They are far from the tasks of papers. A search that was tuned to many tables of similar sizes
fails on them first.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dlrm_sharded.plans.table_optimizers import STATE_BYTES, memory_of
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

MOST_TABLES, MOST_RANKS, MOST_HOSTS = 60, 32, 4
DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 2048)
POOLING_FACTORS = (0.0, 0.001, 1.0, 1.0, 3.7, 50.0, 2000.0)
LOCAL_BATCH_SIZES = (1, 64, 1024, 8192)
MOST_IDS = 2e8
"""Largest number of ids of all tables in a step; busier tables get fewer."""

MEMORY_RATIOS = (1.02, 1.15, 1.5, 4.0, 1000.0)
"""Memory of all ranks relative to that of the tables."""

SHARE_MEASURED = 0.4
"""Share of the tasks whose tables have reuse histograms."""

FIRST_MIXED = 100_000
"""The first seed whose task may have several modules of tables, and sequences."""

SHARE_OF_SEQUENCES = (0.0, 0.3, 1.0)
"""Shares of the tables of such a task that are sequences; each task has one of them."""

SHARE_UNEVEN = 0.25
"""Share of the tasks whose ranks have different memory."""


def stress_task(seed: int) -> ShardingTask:
    """Return a task of 1 to 60 tables on 1 to 32 ranks of 1 to 4 hosts; it may have no plan.

    Args:
        seed: each seed has its own task; from `FIRST_MIXED` on, with modules and sequences.
    """
    rng = np.random.default_rng([seed, 0x0DD])
    num_tables = round(MOST_TABLES ** rng.random())
    num_hosts = int(rng.choice([1, 1, 2, 3, MOST_HOSTS]))
    per_host = int(rng.integers(1, MOST_RANKS // num_hosts + 1))
    world_size = num_hosts * per_host
    device = str(rng.choice(["cpu", "cuda"]))
    optimizers = [None, *(name for name in STATE_BYTES if (device, name) != ("cpu", "adam"))]
    optimizer = optimizers[rng.integers(len(optimizers))]
    per_element, per_row = memory_of(optimizer or "sgd")
    batch_size = world_size * int(rng.choice(LOCAL_BATCH_SIZES))
    is_measured = rng.random() < SHARE_MEASURED
    tables = tuple(_table(f"t{i}", rng, batch_size, is_measured) for i in range(num_tables))
    if seed >= FIRST_MIXED:
        tables = _in_modules(tables, np.random.default_rng([seed, 0x5E9]))
    size = sum(t.num_embeddings * (t.embedding_dim * per_element + per_row) for t in tables)
    share = max(1, int(size * rng.choice(MEMORY_RATIOS) / world_size))
    by_rank = None
    if rng.random() < SHARE_UNEVEN:
        by_rank = tuple(int(share * times) + 1 for times in rng.choice([0.5, 1.0, 2.0], world_size))
    topology = Topology(
        world_size,
        share,
        local_world_size=per_host,
        bytes_per_element=per_element,
        optimizer_bytes_per_row=per_row,
        compute_device=device,
        memory_bytes_by_rank=by_rank,
    )
    return ShardingTask(tables, topology, batch_size, optimizer)


def _in_modules(tables: tuple[Table, ...], rng: np.random.Generator) -> tuple[Table, ...]:
    """Return the tables in modules, some as sequences, of which a module has one width."""
    share, num_modules = float(rng.choice(SHARE_OF_SEQUENCES)), int(rng.integers(1, 4))
    mixed = []
    for table in tables:
        is_sequence = bool(rng.random() < share)
        module = f"module{rng.integers(num_modules)}"
        mixed.append(
            dataclasses.replace(
                table,
                pooled=not is_sequence,
                module=f"{module}.width{table.embedding_dim}" if is_sequence else module,
                num_features=int(rng.choice([1, 1, 1, 2, 10])),
            )
        )
    return tuple(mixed)


def _table(name: str, rng: np.random.Generator, batch_size: int, is_measured: bool) -> Table:
    pooling_factor = float(rng.choice(POOLING_FACTORS))
    histogram = None
    if is_measured:
        histogram = tuple(rng.dirichlet(np.ones(NUM_REUSE_BINS)).tolist())
    return Table(
        name,
        num_embeddings=round(10 ** rng.uniform(0.0, 6.5)),
        embedding_dim=int(rng.choice(DIMS)),
        pooling_factor=min(pooling_factor, MOST_IDS / batch_size),
        reuse_histogram=histogram,
    )
