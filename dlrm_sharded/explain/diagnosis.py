"""Explain why a plan costs what it does under an additive cost model.

Any sharder may have made the plan. Its diagnosis names the ranks and shards that bound the cost,
the gain of each split, and the cost that a short search finds with another rank or more memory.

Letters: S shards, W ranks, C candidate ranks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.exchange_costs import ExchangeCosts
from dlrm_sharded.cost.workload import Floats, Workload, workload_of_plan
from dlrm_sharded.plans.layouts import LAYOUT_NAMES, layout_name
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import Alternative, Diagnosis, RankCost, ShardCost, SplitGain
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import MAX_BYTES, ShardingTask
from dlrm_sharded.search.find_plan import find_quickly
from dlrm_sharded.search.stopping import Clock

BOUNDING_FRACTION = 0.99
"""Ranks that cost at least this fraction of the costliest rank bound the plan."""

MAX_RANKS, MAX_SPLITS = 8, 64
"""Largest numbers of bounding ranks and of split tables in a diagnosis."""

MAX_CANDIDATES = 4
"""Number of ranks with the least time, and of those with the least exchanges, to try a table on."""

SEARCH_S, SPLITS_S, DIAGNOSIS_S = 1.0, 2.0, 3.5
"""Time limits in s: of one search, of the gains of splits, and of the whole diagnosis."""

MIN_REPORTED_GAIN = 5e-3
"""Smallest relative improvement in predicted cost worth reporting."""

ALTERNATIVE_GAP = 0.002
"""Gap to the lower bound at which a search for an alternative ends."""


def diagnose(plan: ShardingPlan, task: CostedTask, *, alternatives: bool) -> Diagnosis:
    """Explain the predicted cost of a valid plan, in a few seconds at most, for plans of any size.

    Args:
        alternatives: whether to search for what another plan, one more rank or host, or more memory
            would gain; that may take 3.5 s.
    """
    started = time.perf_counter()
    costed = _CostedPlan(plan, task)
    totals = [rank.total_ms for rank in costed.cost.per_rank]
    bounding = [rank for rank, ms in enumerate(totals) if ms >= BOUNDING_FRACTION * max(totals)]
    bounding.sort(key=lambda rank: -totals[rank])
    split = {name: shards for name, shards in plan.shards_by_table().items() if len(shards) > 1}
    splits = tuple(costed.splits(split, Clock(started + SPLITS_S)))
    cost_ms, deadline = costed.cost.cost_ms, started + DIAGNOSIS_S
    found = tuple(
        Alternative(change, _better_cost_ms(task.with_task(changed), cost_ms, deadline))
        for change, changed in (_changed_tasks(task.task).items() if alternatives else ())
    )
    return Diagnosis(
        world_size=plan.world_size,
        cost_ms=cost_ms,
        bounding=tuple(costed.rank(rank) for rank in bounding[:MAX_RANKS]),
        num_bounding=len(bounding),
        splits=splits,
        num_split=len(split),
        alternatives=found if alternatives else None,
    )


class _CostedPlan:
    """A plan, with the time that each shard adds to its rank."""

    def __init__(self, plan: ShardingPlan, costed: CostedTask) -> None:
        self._plan, self._costed = plan, costed
        self._tables = {table.name: table for table in costed.task.tables}
        workload = workload_of_plan(plan, costed.task)
        vectors = costed.compute.vectors(workload)
        self.cost: PlanCost = costed.predict_workload(workload)
        crowd = workload.by_rank(vectors)[workload.rank]
        compute_ms = costed.compute.work_ms(vectors, crowd).sum(axis=1)
        costs = ExchangeCosts.from_model(costed.communication, costed.hosts)
        comm_ms = _shard_comm_ms(workload, costs)
        # If volumes are far from even, costs sum to more than a rank's exchanges take; its shards
        # then get their shares of the latter.
        rank_comm_ms = np.array([rank.exchange_ms for rank in self.cost.per_rank])
        share = np.minimum(rank_comm_ms / np.maximum(workload.by_rank(comm_ms), 1e-12), 1.0)
        times_ms = zip(compute_ms.tolist(), (comm_ms * share[workload.rank]).tolist(), strict=True)
        self.shards = tuple(
            ShardCost(shard, self._tables[shard.table], *times)
            for shard, times in zip(plan.shards, times_ms, strict=True)
        )

    def rank(self, rank: int) -> RankCost:
        shards = [shard for shard in self.shards if shard.shard.rank == rank]
        shards.sort(key=lambda shard: -shard.cost_ms)
        return RankCost(rank, self.cost.per_rank[rank].total_ms, tuple(shards))

    def splits(self, by_table: Mapping[str, Sequence[Shard]], clock: Clock) -> list[SplitGain]:
        """Return the gains of the costliest of the split tables, the largest gain first.

        Args:
            by_table: shards of each split table.
        """
        work_ms = dict.fromkeys(by_table, 0.0)
        for shard in self.shards:
            if shard.table.name in work_ms:
                work_ms[shard.table.name] += shard.compute_ms
        gains = []
        for name in sorted(by_table, key=lambda name: -work_ms[name])[:MAX_SPLITS]:
            if clock.is_over:
                break
            shards, table = by_table[name], self._tables[name]
            cost_ms = self._whole_ms(table)
            gain_ms = None if cost_ms is None else cost_ms - self.cost.cost_ms
            layout = layout_name(shards, table, self._costed.task.topology)
            gains.append(SplitGain(name, len(shards), LAYOUT_NAMES[str(layout)], gain_ms))
        # Tables that fit no rank whole come last: the gain of their split is unknown.
        return sorted(gains, key=lambda s: (s.gain_ms is None, -(s.gain_ms or 0.0), s.table))

    def _whole_ms(self, table: Table) -> float | None:
        """Return the cost of the plan with a table whole, on the rank where that costs least.

        It is None if the table fits no rank whole. Only ranks that are likely to be the cheapest
        are tried.
        """
        plan, task, topology = self._plan, self._costed.task, self._costed.task.topology
        whole = Shard.whole(table, 0)
        if whole.num_cols > topology.max_shard_columns:
            return None
        others = tuple(shard for shard in plan.shards if shard.table != table.name)
        used = np.array(dataclasses.replace(plan, shards=others).bytes_by_rank(topology))
        fits = used + whole.bytes_on(topology) <= np.array(topology.rank_memory_bytes)
        # computation and exchanges of the ranks without the table, [W, 2]
        left_ms = np.array([[r.computation_ms, r.exchange_ms] for r in self.cost.per_rank])
        for cost in self.shards:
            if cost.table is table:
                left_ms[cost.shard.rank] -= cost.compute_ms, cost.comm_ms
        # the ranks with the least to do, and those with the least to exchange
        candidates: list[int] = []
        for ms in (left_ms.sum(axis=1), left_ms[:, 1]):
            order = np.argsort(ms, kind="stable")
            candidates += order[fits[order]][:MAX_CANDIDATES].tolist()
        workload = workload_of_plan(dataclasses.replace(plan, shards=(*others, whole)), task)
        costs_ms = []
        for rank in dict.fromkeys(candidates):
            ranks = np.append(workload.rank[:-1], rank)
            changed = self._costed.predict_workload(dataclasses.replace(workload, rank=ranks))
            costs_ms.append(changed.cost_ms)
        return min(costs_ms, default=None)


def _shard_comm_ms(workload: Workload, costs: ExchangeCosts) -> Floats:
    """Return the time [S] that each shard adds to its rank's exchanges."""
    volume = workload.exchange(for_ids=False, sequences=costs.sequences).volume
    host_volume = volume.reshape(-1, workload.ranks_per_host).sum(axis=1)
    per_byte = np.full(len(volume), costs.own_byte_ms + costs.any_byte_ms)
    per_byte[volume >= volume.max()] += costs.busiest_rank_byte_ms
    on_busiest_host = np.repeat(host_volume >= host_volume.max(), workload.ranks_per_host)
    per_byte[on_busiest_host] += costs.busiest_host_byte_ms
    num_bytes, size = workload.vector_bytes(costs.sequences), workload.reduce_size
    times: Floats = per_byte[workload.rank] * num_bytes / np.maximum(size, 1) + costs.shard_ms
    for group_size, reduce in costs.reduces.items():
        num_groups = workload.world_size // group_size
        reduce_ms = reduce.byte_ms * num_bytes * num_groups + reduce.shard_ms
        # after a reduction over all ranks nothing is left to exchange
        left_ms = times if num_groups > 1 else 0.0
        times = np.where(size == group_size, left_ms + reduce_ms, times)
    gradient_ms = costs.gradients.byte_ms * workload.replica_bytes()
    return np.where(workload.is_replica, gradient_ms, times)


def _changed_tasks(task: ShardingTask) -> dict[str, ShardingTask]:
    """Return the task itself, with one more rank or host, and with more memory, by description."""
    topology = task.topology
    one_host = topology.ranks_per_host == topology.world_size
    more, by_rank = 1 if one_host else topology.ranks_per_host, topology.memory_bytes_by_rank
    with_ranks = dataclasses.replace(
        topology,
        world_size=topology.world_size + more,
        local_world_size=None if one_host else topology.local_world_size,
        memory_bytes_by_rank=by_rank and (*by_rank, *(min(by_rank),) * more),
    )
    with_memory = dataclasses.replace(
        topology,
        memory_bytes=min(topology.memory_bytes * 11 // 10, MAX_BYTES),
        memory_bytes_by_rank=by_rank and tuple(min(b * 11 // 10, MAX_BYTES) for b in by_rank),
    )
    return {
        "another plan": task,
        f"one more {'rank' if one_host else 'host'}": dataclasses.replace(
            task, topology=with_ranks
        ),
        "10 % more memory": dataclasses.replace(task, topology=with_memory),
    }


def _better_cost_ms(costed: CostedTask, cost_ms: float, deadline: float) -> float | None:
    """Return the predicted cost of the plan that a search finds; None without an improvement."""
    clock = Clock(min(deadline, time.perf_counter() + SEARCH_S))
    if clock.is_over:
        return None
    bound_ms = lower_bound_ms(costed)
    if bound_ms >= cost_ms * (1 - MIN_REPORTED_GAIN):
        return None
    plan = find_quickly(costed, bound_ms, good_gap=ALTERNATIVE_GAP, clock=clock)
    if plan is None:
        return None
    found_ms = costed.predict(plan).cost_ms
    return found_ms if found_ms < cost_ms * (1 - MIN_REPORTED_GAIN) else None
