"""The price of plans in which every rank holds the smallest tables, as NVIDIA's for MLPerf do.

Such plans cannot be made or trained yet; only their cost is predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.cost.features import Workload, workload_of_plan, workload_of_rows
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.profiles import with_expected_profile, with_profiles
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask

NUM_REPLICATED = 13
EXPONENT = 0.9
GRADIENT_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class Priced:
    """Predicted cost of the slowest rank, and its parts."""

    lookups_ms: float
    exchanges_ms: float

    @property
    def cost_ms(self) -> float:
        return self.lookups_ms + self.exchanges_ms


def priced_with_replicas(
    task: ShardingTask,
    model: LearnedCostModel,
    make_sharder: Callable[[LearnedCostModel], Sharder],
) -> Priced:
    """Price the smallest tables on every rank, and the others under a sharder's plan.

    A rank looks up its own samples in replicas, which takes no exchange, and all ranks add up the
    gradients of all rows of the replicas: a reduce-scatter and an all-gather.
    """
    by_size = sorted(task.tables, key=lambda table: table.num_embeddings * table.embedding_dim)
    replicated, others = by_size[:NUM_REPLICATED], tuple(by_size[NUM_REPLICATED:])
    sharded_task = with_profiles(dataclasses.replace(task, tables=others))
    plan = make_sharder(model).shard(sharded_task)
    workload = workload_of_plan(plan, sharded_task)
    replicas = _replicas(replicated, task)
    sums = workload.by_rank(model.compute.vectors(workload))
    sums += replicas.by_rank(model.compute.vectors(replicas))
    lookups_ms = model.compute.times_ms(sums, workload.num_lookups() + 1.0).sum(axis=1)
    of_task = model.for_task(sharded_task)
    hosts = of_task.hosts(task.topology)
    exchanges_ms = np.sum([of_task.exchange_ms(k, workload, hosts) for k in STEP_EXCHANGES], axis=0)
    exchanges_ms += _all_reduce_ms(replicated, sharded_task, model)
    slowest = int(np.argmax(lookups_ms + exchanges_ms))
    return Priced(float(lookups_ms[slowest]), float(exchanges_ms[slowest]))


def _replicas(tables: list[Table], task: ShardingTask) -> Workload:
    """Return all tables on all ranks, each with the ids of one rank's samples."""
    size, local_batch_size = task.topology.world_size, task.batch_size // task.topology.world_size
    known = with_expected_profile(tables, batch_size=local_batch_size, exponent=EXPONENT)
    shards = [
        (
            (
                *(rank, 1, table.num_embeddings, table.embedding_dim),
                local_batch_size * table.pooling_factor,
            ),
            table.reuse_histogram or (),
        )
        for rank in range(size)
        for table in known
    ]
    rows, histograms = zip(*shards, strict=True)
    return workload_of_rows(size, task.topology.ranks_per_host, local_batch_size, rows, histograms)


def _all_reduce_ms(tables: list[Table], task: ShardingTask, model: LearnedCostModel) -> float:
    assert model.exchange_curves is not None
    num_bytes = sum(table.num_embeddings * table.embedding_dim for table in tables) * GRADIENT_BYTES
    even, volume = EvenVolumes.of_task(task), num_bytes / task.topology.world_size
    halves = ("reduce_scatter", "all_gather")
    return sum(model.exchange_curves.ring_ms(half, volume, even) for half in halves)
