"""Explain why a plan costs what it does under an additive cost model.

Any sharder may have made the plan. Its diagnosis names the ranks and shards that bound the cost,
the gain of each split, and the cost that a short search finds with another rank or more memory.

Letters: S shards, W ranks, C candidate ranks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats, Workload, workload_of_plan
from dlrm_sharded.plans.layouts import is_replicated, is_row_wise
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import Alternative, Diagnosis, RankCost, ShardCost, SplitGain
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.task_keys import MAX_BYTES
from dlrm_sharded.search.find_plan import find_quickly
from dlrm_sharded.search.stopping import Clock

BOUNDING_FRACTION = 0.99
"""Ranks that cost at least this fraction of the costliest rank bound the plan."""

MAX_RANKS, MAX_SPLITS = 8, 64
"""Largest numbers of bounding ranks and of split tables in a diagnosis."""

MAX_CANDIDATES = 16
"""Largest number of ranks on which a split table is tried whole."""

SEARCH_S, DIAGNOSIS_S = 1.0, 2.5
"""Time limits in s: of one search or of pricing the splits, and of the whole diagnosis."""

MIN_REPORTED_GAIN = 5e-3
"""Smallest relative improvement in predicted cost worth reporting."""

ALTERNATIVE_GAP = 0.002
"""Gap to the lower bound at which a search for an alternative ends."""

Indices = NDArray[np.int64]


def diagnose(plan: ShardingPlan, task: PricedTask, *, alternatives: bool) -> Diagnosis:
    """Explain the predicted cost of a valid plan, in a few seconds at most, for plans of any size.

    Args:
        alternatives: whether to search for what another plan, one more rank or more memory would
            gain; that may take 2.5 s.
    """
    started = time.perf_counter()
    priced = _PricedPlan(plan, task)
    totals = [rank.total_ms for rank in priced.cost.per_rank]
    bounding = [rank for rank, ms in enumerate(totals) if ms >= BOUNDING_FRACTION * max(totals)]
    bounding.sort(key=lambda rank: -totals[rank])
    split = [name for name, shards in plan.shards_by_table().items() if len(shards) > 1]
    return Diagnosis(
        world_size=plan.world_size,
        cost_ms=priced.cost.cost_ms,
        bounding=tuple(priced.rank(rank) for rank in bounding[:MAX_RANKS]),
        num_bounding=len(bounding),
        splits=tuple(priced.splits(split, Clock(started + SEARCH_S))),
        num_split=len(split),
        alternatives=_alternatives(task, priced.cost.cost_ms, started + DIAGNOSIS_S)
        if alternatives
        else None,
    )


def shard_costs(plan: ShardingPlan, task: PricedTask) -> tuple[ShardCost, ...]:
    """Return the time that each shard of a valid plan adds to its rank, in the plan's order."""
    priced = _PricedPlan(plan, task)
    return tuple(map(priced.shard, range(len(plan.shards))))


def _alternatives(task: PricedTask, cost_ms: float, deadline: float) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(change, _better_cost_ms(task.with_task(changed), cost_ms, deadline))
        for change, changed in _changed_tasks(task.task)
    )


class _PricedPlan:
    """A plan, with the time that each shard adds to its rank."""

    def __init__(self, plan: ShardingPlan, priced: PricedTask) -> None:
        task = priced.task
        self._plan = plan
        self._task = task
        self._used = np.array(plan.bytes_by_rank(task.topology))
        self._compute, self._communication = priced.compute, priced.communication
        self._hosts = priced.hosts
        self._tables = {table.name: table for table in task.tables}
        self._workload = workload = workload_of_plan(plan, task)
        self._vectors = priced.compute.vectors(workload)
        self.cost: PlanCost = priced.predict_workload(workload)
        crowd = workload.by_rank(self._vectors)[workload.rank]
        self._compute_ms = priced.compute.work_ms(self._vectors, crowd).sum(axis=1)
        prices = ExchangePrices.from_model(priced.communication, self._hosts)
        comm_ms = _shard_comm_ms(workload, prices)
        # Where volumes are far from even, prices sum to more than a rank's exchanges take; its
        # shards then get their shares of that time.
        rank_comm_ms = np.array([rank.exchange_ms for rank in self.cost.per_rank])
        share = np.minimum(rank_comm_ms / np.maximum(workload.by_rank(comm_ms), 1e-12), 1.0)
        self._comm_ms = comm_ms * share[workload.rank]

    def shard(self, place: int) -> ShardCost:
        shard = self._plan.shards[place]
        return ShardCost(
            shard=shard,
            table=self._tables[shard.table],
            compute_ms=float(self._compute_ms[place]),
            comm_ms=float(self._comm_ms[place]),
        )

    def rank(self, rank: int) -> RankCost:
        shards = [
            self.shard(place) for place, shard in enumerate(self._plan.shards) if shard.rank == rank
        ]
        return RankCost(
            rank=rank,
            cost_ms=self.cost.per_rank[rank].total_ms,
            shards=tuple(sorted(shards, key=lambda shard: -shard.cost_ms)),
        )

    def splits(self, names: Sequence[str], clock: Clock) -> list[SplitGain]:
        """Return the gains of the costliest of the named tables, the largest gain first."""
        places: dict[str, list[int]] = {name: [] for name in names}
        for i, shard in enumerate(self._plan.shards):
            if shard.table in places:
                places[shard.table].append(i)
        names = sorted(names, key=lambda name: -float(self._compute_ms[places[name]].sum()))
        names = names[:MAX_SPLITS]
        if not names:
            return []
        whole = [Shard.whole(self._tables[name], 0) for name in names]
        all_whole = ShardingPlan(self._plan.world_size, tuple(whole))
        vectors = self._compute.vectors(workload_of_plan(all_whole, self._task))
        gains = []
        for i, name in enumerate(names):
            if clock.is_over:
                break
            shards = [self._plan.shards[place] for place in places[name]]
            cost_ms = self._whole_ms(places[name], whole[i], vectors[i])
            gains.append(
                SplitGain(
                    table=name,
                    num_shards=len(shards),
                    kind=_kind(shards, self._tables[name]),
                    gain_ms=None if cost_ms is None else cost_ms - self.cost.cost_ms,
                )
            )
        # Tables that fit no rank whole come last: the gain of their split has no figure.
        return sorted(gains, key=lambda s: (s.gain_ms is None, -(s.gain_ms or 0.0), s.table))

    def _whole_ms(self, places: Sequence[int], whole: Shard, vector: Floats) -> float | None:
        """Return the cost of the plan with a table whole, on the rank where that costs least.

        It is None if the table fits no rank whole.
        """
        compute, topology = self._compute, self._task.topology
        if whole.num_cols > topology.max_shard_columns:
            return None
        others = np.ones(len(self._plan.shards), dtype=bool)
        others[list(places)] = False
        workload = self._workload.select(others)
        free = np.array(topology.rank_memory_bytes) - self._used_without(places)
        lookups = workload.num_lookups()
        # All unsplit shards and column shards of a module on a rank share one lookup; where a rank
        # has none, the whole table adds one.
        in_module = self._looked_up_with(self._tables[whole.table])[others]
        in_columns = workload.rank[in_module & (workload.group_size == 1)]
        new_lookup = np.bincount(in_columns, minlength=workload.world_size) == 0
        sums = workload.by_rank(self._vectors[others])
        without_ms = compute.times_ms(sums, lookups).sum(axis=1)
        with_ms = compute.times_ms(sums + vector, lookups + new_lookup).sum(axis=1)
        candidates = np.flatnonzero(free >= whole.bytes_on(topology))
        candidates = candidates[np.argsort(with_ms[candidates], kind="stable")[:MAX_CANDIDATES]]
        if not len(candidates):
            return None
        costs = np.repeat(without_ms[None], len(candidates), axis=0)  # [C, W]
        costs[np.arange(len(candidates)), candidates] = with_ms[candidates]
        sizes = workload.group_size
        exchanged = in_module & (workload.reduce_size == sizes) & (sizes < workload.world_size)
        is_new = not (exchanged & ~workload.is_replica).any()
        costs += self._exchange_ms(workload, candidates, whole, is_new=is_new)
        return float(costs.max(axis=1).min())

    def _looked_up_with(self, whole: Table) -> NDArray[np.bool_]:
        """Return [S], shards of the module of a whole table, without columns of its sequences."""
        tables = [self._tables[shard.table] for shard in self._plan.shards]
        return np.array(
            [
                (table.module, table.pooled) == (whole.module, whole.pooled)
                and (table.pooled or shard.num_cols == table.embedding_dim)
                for table, shard in zip(tables, self._plan.shards, strict=True)
            ]
        )

    def _exchange_ms(
        self, workload: Workload, candidates: Indices, whole: Shard, *, is_new: bool
    ) -> Floats:
        """Return the exchanges' times [C, W] with one more shard, on each candidate in turn.

        Args:
            is_new: whether the shard's module has no other shard in the all-to-all.
        """
        table, times = self._tables[whole.table], np.zeros((len(candidates), workload.world_size))
        places = np.arange(len(candidates)), candidates
        num_vectors = workload.batch_size * table.vectors_per_sample
        num_bytes = FLOAT_BYTES * whole.num_cols * num_vectors / workload.world_size
        model = self._communication
        for kind, (of_sequences, _) in zip(STEP_EXCHANGES, model.sequence_factors, strict=True):
            exchange = model.exchange_of(kind, workload)
            volume = np.repeat(exchange.volume[None], len(candidates), axis=0)
            volume[places] += num_bytes * (1.0 if table.pooled else of_sequences)
            num_shards = np.repeat(exchange.num_shards[None], len(candidates), axis=0)
            num_shards[places] += 1
            num_more = 0 if workload.owner is None else max(exchange.num_launches + is_new - 1, 0)
            times += model.all_to_all_ms(kind, volume, num_shards, self._hosts)
            times += model.reduces_ms(kind, exchange, self._hosts)
            times += num_more * model.launch_ms(kind, self._hosts)
        return times

    def _used_without(self, places: Sequence[int]) -> Indices:
        used = self._used.copy()
        for place in places:
            shard = self._plan.shards[place]
            used[shard.rank] -= shard.bytes_on(self._task.topology)
        return used


def _shard_comm_ms(workload: Workload, prices: ExchangePrices) -> Floats:
    """Return the time [S] that each shard adds to its rank's exchanges."""
    volume = workload.exchange(for_ids=False, sequences=prices.sequences).volume
    host_volume = volume.reshape(prices.num_hosts, -1).sum(axis=1)
    per_byte = np.full(len(volume), prices.own_byte_ms + prices.any_byte_ms)
    per_byte[volume >= volume.max()] += prices.busiest_rank_byte_ms
    on_busiest_host = np.repeat(host_volume >= host_volume.max(), workload.ranks_per_host)
    per_byte[on_busiest_host] += prices.busiest_host_byte_ms
    num_bytes, size = workload.vector_bytes(prices.sequences), workload.reduce_size
    times: Floats = per_byte[workload.rank] * num_bytes / np.maximum(size, 1) + prices.shard_ms
    for group_size, reduce in prices.reduces.items():
        num_groups = workload.world_size // group_size
        reduce_ms = reduce.byte_ms * num_bytes * num_groups + reduce.shard_ms
        # after a reduction over all ranks nothing is left to exchange
        left_ms = times if num_groups > 1 else 0.0
        times = np.where(size == group_size, left_ms + reduce_ms, times)
    gradient_ms = prices.gradients.byte_ms * workload.replica_bytes()
    return np.where(workload.is_replica, gradient_ms, times)


def _kind(shards: Sequence[Shard], table: Table) -> str:
    """Return what the shards of a table are called."""
    if is_replicated(shards):
        return "replicas"
    return "row blocks" if is_row_wise(shards, table) else "column shards"


def _changed_tasks(task: ShardingTask) -> list[tuple[str, ShardingTask]]:
    """Return descriptions of changes of the task, each with the changed task."""
    topology = task.topology
    one_host = topology.ranks_per_host == topology.world_size
    return [
        ("another plan", task),
        (
            "one more rank" if one_host else "one more host",
            dataclasses.replace(task, topology=_with_more_ranks(topology)),
        ),
        ("10 % more memory", dataclasses.replace(task, topology=_with_more_memory(topology))),
    ]


def _with_more_ranks(topology: Topology) -> Topology:
    """Return the topology with one more host, or one more rank on the only host."""
    one_host = topology.ranks_per_host == topology.world_size
    more = 1 if one_host else topology.ranks_per_host
    by_rank = topology.memory_bytes_by_rank
    return dataclasses.replace(
        topology,
        world_size=topology.world_size + more,
        local_world_size=None if one_host else topology.local_world_size,
        memory_bytes_by_rank=by_rank and (*by_rank, *(min(by_rank),) * more),
    )


def _with_more_memory(topology: Topology) -> Topology:
    by_rank = topology.memory_bytes_by_rank
    return dataclasses.replace(
        topology,
        memory_bytes=_tenth_more(topology.memory_bytes),
        memory_bytes_by_rank=by_rank and tuple(map(_tenth_more, by_rank)),
    )


def _tenth_more(memory_bytes: int) -> int:
    """Return 10 % more memory, up to the limit of a topology."""
    return min(memory_bytes * 11 // 10, MAX_BYTES)


def _better_cost_ms(priced: PricedTask, cost_ms: float, deadline: float) -> float | None:
    """Return the predicted cost of the plan that a search finds; None if it is no improvement."""
    clock = Clock(min(deadline, time.perf_counter() + SEARCH_S))
    if clock.is_over:
        return None
    bound_ms = lower_bound_ms(priced)
    if bound_ms >= cost_ms * (1 - MIN_REPORTED_GAIN):
        return None
    plan = find_quickly(priced, bound_ms, good_gap=ALTERNATIVE_GAP, clock=clock)
    if plan is None:
        return None
    found_ms = priced.predict(plan).cost_ms
    return found_ms if found_ms < cost_ms * (1 - MIN_REPORTED_GAIN) else None
