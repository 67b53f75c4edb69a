"""How large random plans are: by default as large as training steps on the device are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlrm_sharded.calibration.random_plans import MAX_COLS, RankLimits
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.table_optimizers import CAN_REPLICATE, memory_of
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.agreement import reported_by_rank_zero
from dlrm_sharded.ranks.distributed import Rank

POOLED_COPIES = 8
"""Largest number of copies of a rank's pooled vectors that a measurement holds at a time: vectors
and gradients, each before, in and after the exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSizes:
    """Sizes of the random plans of a collection.

    Args:
        batch_sizes: global batch sizes.
        table_gib: memory of a rank for tables and the state of their optimizer.
        ids_per_step: largest number of ids that a rank looks up.
        pooled_gib: largest size of the pooled vectors that a rank looks up; None for no limit.
        widest_cols: range of the largest width of a plan.
        wide_cols: largest width of a shard in a few plans of computation.
    """

    batch_sizes: tuple[int, ...]
    table_gib: float
    ids_per_step: int
    pooled_gib: float | None = None
    widest_cols: tuple[int, int] = (MAX_COLS, MAX_COLS)
    wide_cols: int = MAX_COLS

    def rank_limits(self, optimizer: str) -> RankLimits:
        """Return the limits of the plans' ranks.

        Args:
            optimizer: one of `EMBEDDING_OPTIMIZERS`, whose state takes part of the memory.
        """
        weight_share = 4 / memory_of(optimizer)[0]
        return RankLimits(
            table_bytes=int(weight_share * self.table_gib * GIB),
            ids_per_step=self.ids_per_step,
            pooled_bytes=math.inf if self.pooled_gib is None else self.pooled_gib * GIB,
            widest_cols=self.widest_cols,
            wide_cols=self.wide_cols,
            replicas=optimizer in CAN_REPLICATE,
        )


CPU_SIZES = PlanSizes(
    batch_sizes=(1024, 2048, 4096, 8192), table_gib=2.0, ids_per_step=1_500_000, wide_cols=2048
)
GPU_SIZES = PlanSizes(
    batch_sizes=(8192, 16384, 32768, 65536, 131072),
    table_gib=24.0,
    ids_per_step=8_000_000,
    widest_cols=(32, 1024),
)
"""Sizes at which bandwidth decides and not the launch of kernels; on small GPUs they are smaller.
Random reads of tables of several GiB are slower than those of small ones, on a GPU too. Its lookups
depend on the widest table, so plans differ in that."""


def plan_sizes(
    rank: Rank,
    *,
    batch_sizes: Sequence[int] | None,
    table_gib: float | None,
    ids_per_step: int | None,
) -> PlanSizes:
    """Return the given sizes, with those of the device for None; all ranks call it together.

    Raises:
        ConfigError: a batch size does not divide by the ranks, or `table_gib` does not fit a GPU.
    """
    for batch_size in batch_sizes or ():
        if batch_size % rank.world_size:
            raise reported_by_rank_zero(
                ConfigError(
                    f"batch_sizes has {batch_size}, which does not divide by {rank.world_size} "
                    "ranks; give multiples of the ranks, or other ranks"
                )
            )
    gpu_gib = _smallest_free_gib(rank) if rank.device.type == "cuda" else None
    if gpu_gib is not None and table_gib is not None:
        largest_gib = gpu_gib - _half_gib(gpu_gib)
        if table_gib > largest_gib:
            raise reported_by_rank_zero(
                ConfigError(
                    f"table_gib is {table_gib:g}, but a GPU has {gpu_gib:.1f} GiB free, of which "
                    f"{_half_gib(gpu_gib):g} are for pooled vectors and gradients; give at most "
                    f"{largest_gib:.1f}, or null for a size that fits"
                )
            )
    sizes = default_sizes(world_size=rank.world_size, gpu_gib=gpu_gib)
    return dataclasses.replace(
        sizes,
        batch_sizes=tuple(batch_sizes or sizes.batch_sizes),
        table_gib=table_gib or sizes.table_gib,
        ids_per_step=ids_per_step or sizes.ids_per_step,
    )


def default_sizes(*, world_size: int, gpu_gib: float | None) -> PlanSizes:
    """Return sizes for the ranks of a job, with batch sizes that divide by their number.

    Args:
        gpu_gib: smallest free memory of the ranks' GPUs; None if they compute on CPUs.
    """
    sizes = CPU_SIZES
    if gpu_gib is not None:
        half_gib = _half_gib(gpu_gib)
        sizes = dataclasses.replace(
            GPU_SIZES,
            table_gib=min(GPU_SIZES.table_gib, half_gib),
            pooled_gib=half_gib / POOLED_COPIES,
        )
    rounded = {max(size - size % world_size, world_size) for size in sizes.batch_sizes}
    return dataclasses.replace(sizes, batch_sizes=tuple(sorted(rounded)))


def _half_gib(gpu_gib: float) -> float:
    """Return the memory that tables get, and as much for pooled vectors and their gradients.

    It is half of a power of two, so that a resumed collection, which finds a little more or less
    memory free, has the same sizes.
    """
    return float(2.0 ** math.floor(math.log2(gpu_gib))) / 2


def _smallest_free_gib(rank: Rank) -> float:
    free_bytes: list[Any] = [None] * rank.world_size
    dist.all_gather_object(free_bytes, torch.cuda.mem_get_info(rank.device)[0])
    return float(min(free_bytes) / GIB)
