"""An additive cost model of one's own, in which a shard adds the time that a function gives.

Letters: S shards, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.communication import UNMEASURED, CommunicationModel, Hosts, with_stated
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats, Workload, workload_of_plan
from dlrm_sharded.files.errors import check_number
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import DIRECTIONS, PlanCost
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask

ShardTimes = Callable[[Workload], tuple[Floats, Floats]]
"""Returns the forward and the backward time of every shard, in ms, [S] each."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearCostModel:
    """Predicts that a rank takes the sum of its shards' times, and its exchanges their bytes' time.

    Search, lower bound and diagnosis rely on times that are not negative, and that do not fall
    where a shard gets more columns or rows; `testing.check_cost_model` checks that. Tables need no
    access profile, and are given none.

    Args:
        lookup_ms: times of shards. A `Workload` has their rows, columns, ids and profiles as
            arrays; `num_ids` and `num_samples` are those of a step that reach the shard.
        exchange_ms_per_mb: time of a MB that the busiest rank sends to others; None for the
            bandwidths that the topology states, and 1 GB/s where it states none.
        launch_ms: time of a rank in each direction for each fused lookup module on it.
    """

    lookup_ms: ShardTimes
    exchange_ms_per_mb: float | None = None
    launch_ms: float = 0.0

    def __post_init__(self) -> None:
        check_number("launch_ms", self.launch_ms)
        if self.exchange_ms_per_mb is not None:
            check_number("exchange_ms_per_mb", self.exchange_ms_per_mb)

    def price(
        self, task: ShardingTask, exchange_precision: ExchangePrecision = FP32_EXCHANGE
    ) -> PricedTask:
        """Return the task, as it is, with its prices."""
        hosts = Hosts.from_topology(task.topology, measured=())
        if (ms_per_mb := self.exchange_ms_per_mb) is not None:
            hosts = Hosts(hosts.world_size, hosts.ranks_per_host, ms_per_mb, ms_per_mb)
        return PricedTask(
            model=self,
            task=task,
            exchange_precision=exchange_precision,
            compute=LinearLookups(self.lookup_ms, self.launch_ms),
            communication=_BUSIEST_RANK.with_precision(exchange_precision, {}),
            hosts=hosts,
        )

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """Predict a valid plan."""
        priced = self.price(task, plan.exchange_precision)
        return priced.predict_workload(workload_of_plan(plan, task))


@dataclass(frozen=True, slots=True, eq=False)
class LinearLookups:
    """Computation of ranks as sums over shards: the `LookupPrices` of a `LinearCostModel`.

    A shard's vector has its two times, and 0 MB read, as what a rank reads changes no price.
    """

    shard_ms: ShardTimes
    next_launch_ms: float
    widest_ms: ClassVar[None] = None

    def vectors(self, workload: Workload) -> Floats:
        """Return [S, 3], forward and backward time of each shard, and 0."""
        times = [np.broadcast_to(ms, workload.rank.shape) for ms in self.shard_ms(workload)]
        return np.column_stack([*times, np.zeros(len(workload.rank))])

    def times_ms(self, sums: Floats, num_lookups: Floats) -> Floats:
        """Return [N, 2], time of forward and backward computation."""
        return self.work_ms(sums, sums) + self.launch_ms(num_lookups)

    def work_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [N, 2], the times that shards add to ranks with any crowd."""
        times: Floats = vectors[:, : len(DIRECTIONS)]
        return times

    def stand_alone_ms(self, vectors: Floats) -> Floats:
        """Return [N], both directions of shards on ranks of their own."""
        times: Floats = self.work_ms(vectors, vectors).sum(axis=1)
        return times

    def crowding_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return zeros: shards do not slow each other down."""
        return np.zeros(len(DIRECTIONS))

    def launch_ms(self, num_lookups: Floats) -> Floats:
        """Return [N, 2], time to launch the lookups."""
        return self.next_launch_ms * np.repeat(num_lookups[:, None], len(DIRECTIONS), axis=1)


_BUSIEST_RANK: CommunicationModel = with_stated(UNMEASURED, measured=())
"""Exchanges that take as long as the bytes of the busiest rank take on its links."""


def _reading_bytes(workload: Workload) -> tuple[Floats, Floats]:
    """Return the times of reading each id's columns at 10 GB/s, and of updating them."""
    read_ms = (workload.num_ids + workload.num_samples) * workload.num_cols * FLOAT_BYTES / 1e7
    return read_ms, 2.0 * read_ms


BYTES = LinearCostModel(_reading_bytes)
"""Prices of no hardware in particular, by which a search finds a first plan."""

NO_PRICES = LinearCostModel(lambda _: (np.zeros(1), np.zeros(1)), exchange_ms_per_mb=0.0)
"""Model in which nothing takes time."""
