"""A task on which sharders are compared, and how sets of such tasks draw and resize tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.datasets.presets import PAPER_DIMS, Tables, draw_tables
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology

RANKS_PER_HOST = 8
HOST_BYTES_PER_S = 1.25e9
"""Bandwidth of one rank to other hosts: 10 Gbit/s."""


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


def cpu_ranks(world_size: int, memory_bytes: int, *, on_hosts: bool = False) -> Topology:
    """Return CPU ranks, for which the package has cost models, on one host or on hosts of 8."""
    return Topology(
        world_size,
        memory_bytes,
        local_world_size=RANKS_PER_HOST if on_hosts else world_size,
        compute_device="cpu",
        inter_host_bytes_per_s=HOST_BYTES_PER_S if on_hosts else None,
    )


def draw(
    pool: Sequence[Table],
    num_tables: int,
    rng: np.random.Generator,
    dims: Sequence[int] = PAPER_DIMS,
) -> Tables:
    return draw_tables(pool, num_tables=num_tables, dims=dims, seed=int(rng.integers(2**32)))


def with_rows(table: Table, num_rows: float) -> Table:
    return dataclasses.replace(table, num_embeddings=max(1, int(num_rows)))
