"""Limits on drawn plans, which are about as large as training steps on the device."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.table_optimizers import CAN_REPLICATE, memory_of
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.device_memory import free_bytes
from dlrm_sharded.ranks.distributed import Rank

BATCH_SIZES = {"cpu": (1024, 2048, 4096, 8192), "cuda": (8192, 16384, 32768, 65536, 131072)}
"""Global batch sizes by type of device: on a GPU, those at which bandwidth decides and not the
launch of kernels."""

MIN_ROWS = 100
"""Rows that a drawn table keeps when its rank has too little memory."""

POOLED_COPIES = 8
"""Largest number of copies of a rank's pooled vectors that a measurement holds at a time: vectors
and gradients, each before, in and after the exchange."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Upper limits for one rank.

    Args:
        table_bytes: memory for the weights of tables.
        ids_per_step: number of ids that it looks up.
        vector_bytes: size of the pooled vectors that it looks up, before they are exchanged, and of
            the vectors of sequences.
        replicas: whether plans may have replicas.
    """

    table_bytes: int
    ids_per_step: int
    vector_bytes: float = math.inf
    replicas: bool = True


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Sizes of the drawn plans of a kind of collection, by type of device.

    Args:
        table_gib: memory of a rank for tables and the state of their optimizer.
        ids_per_step: largest number of ids that a rank looks up.
        memory_share: largest share of a rank's free memory for tables, and for pooled vectors.
    """

    table_gib: dict[str, float]
    ids_per_step: dict[str, int]
    memory_share: float


FIRST_RUN = PlanSizes({"cpu": 0.5, "cuda": 4.0}, {"cpu": 300_000, "cuda": 2_000_000}, 0.1)
"""Beyond the caches, and small enough for dozens of plans within 20 s."""

CALIBRATION = PlanSizes({"cpu": 2.0, "cuda": 24.0}, {"cpu": 1_500_000, "cuda": 8_000_000}, 0.5)
"""Random reads of tables of several GiB are slower than those of small ones, on a GPU too."""


def plan_limits(rank: Rank, optimizer: str, sizes: PlanSizes) -> PlanLimits:
    """Return the limits of a job's ranks, the same on all of them; they call it together.

    Args:
        optimizer: one of `STATE_BYTES`, whose state takes part of the memory.
    """
    free: list[Any] = [None] * rank.world_size
    dist.all_gather_object(free, free_bytes(rank.device, rank.local_world_size))
    usable_bytes = sizes.memory_share * min(free)
    table_bytes = min(sizes.table_gib[rank.device.type] * GIB, usable_bytes)
    return PlanLimits(
        table_bytes=int(4 / memory_of(optimizer)[0] * table_bytes),
        ids_per_step=sizes.ids_per_step[rank.device.type],
        vector_bytes=usable_bytes / POOLED_COPIES,
        replicas=optimizer in CAN_REPLICATE,
    )


def within_limits(
    limits: PlanLimits, tables: list[DrawnTable], world_size: int, batch_size: int
) -> list[DrawnTable]:
    """Scale columns, rows and pooling factors down until every rank is within the limits."""
    num_cols = _sums_by_rank(tables, [table.num_cols for table in tables], world_size)
    max_cols = limits.vector_bytes / (4 * batch_size)
    if num_cols.max() > max_cols:
        quarters = max_cols / num_cols.max() / COLUMN_MULTIPLE
        tables = [
            dataclasses.replace(t, num_cols=max(1, int(t.num_cols * quarters)) * COLUMN_MULTIPLE)
            for t in tables
        ]
    # row blocks and replicas share the ids of their table, and replicas have all rows of it
    num_ranks = [world_size if table.rank is None else 1 for table in tables]
    ids = [batch_size * t.pooling_factor / num for t, num in zip(tables, num_ranks, strict=True)]
    weights = [
        4 * table.num_rows * (table.num_cols + 1) / (1 if table.replicated else num)
        for table, num in zip(tables, num_ranks, strict=True)
    ]
    vectors = [
        0 if table.pooled else 4 * table.num_cols * num
        for table, num in zip(tables, ids, strict=True)
    ]
    fewer_rows, fewer_ids, shorter = (
        min(1.0, limit / max(_sums_by_rank(tables, values, world_size).max(), 1.0))
        for values, limit in (
            (weights, limits.table_bytes),
            (ids, limits.ids_per_step),
            (vectors, limits.vector_bytes),
        )
    )
    scaled = []
    for table in tables:
        num_rows = max(int(table.num_rows * fewer_rows), min(table.num_rows, MIN_ROWS))
        if table.rank is None and not table.replicated:
            num_rows = whole_blocks(num_rows, world_size)
        factor = fewer_ids if table.pooled else min(fewer_ids, shorter)
        scaled.append(
            dataclasses.replace(
                table, num_rows=num_rows, pooling_factor=float(table.pooling_factor * factor)
            )
        )
    return scaled


def whole_blocks(num_rows: int, world_size: int) -> int:
    """Round rows to a multiple of the ranks, so that each gets a block: down, but not to 0."""
    return max(num_rows // world_size, 1) * world_size


def _sums_by_rank(tables: list[DrawnTable], values: list[float], world_size: int) -> Any:
    """Return [W], the sums of the tables' values on each rank; those on all ranks count on each."""
    sums = np.zeros(world_size)
    for table, value in zip(tables, values, strict=True):
        sums[slice(None) if table.rank is None else table.rank] += value
    return sums
