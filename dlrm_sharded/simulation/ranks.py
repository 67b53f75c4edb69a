"""The computation of every rank under a plan: measured, taken from an equal rank, or scaled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_sharded.calibration.measure import MeasureConfig
from dlrm_sharded.calibration.rank_bench import RankBench, ShardIds
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.plan_cost import PlanCost, StageCost
from dlrm_sharded.simulation.folding import fold
from dlrm_sharded.simulation.progress import Progress
from dlrm_sharded.simulation.store import Store

MEASURED, EQUAL, SCALED, PRICED, EMPTY = "measured", "equal", "scaled", "priced", "empty"
ORIGINS = (MEASURED, EQUAL, SCALED, PRICED, EMPTY)
"""How a rank's computation is known: it was measured here, or taken from a rank whose shards have
the same shapes and ids; predicted and scaled, or priced by a prior; the rank has no shards."""

COMPUTATION = ("fwd_compute", "bwd_compute")
"""Stages in which a rank computes."""

SETUP_S = 0.5
"""Assumed time to draw the ids of a rank and to build its tables."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The computation of one rank.

    Args:
        origin: one of `ORIGINS`.
        num_folded: shards that had fewer rows in the measurement than in the plan.
    """

    fwd_compute_ms: float
    bwd_compute_ms: float
    origin: str
    num_folded: int = 0


def shards_by_rank(plan: ShardingPlan) -> list[list[Shard]]:
    """Return the shards of every rank, in their order in the plan."""
    by_rank: list[list[Shard]] = [[] for _ in range(plan.world_size)]
    for shard in plan.shards:
        by_rank[shard.rank].append(shard)
    return by_rank


def shapes(shards: Sequence[Shard]) -> tuple[tuple[Any, ...], ...]:
    """Return what decides a rank's computation; equal for ranks that compute the same.

    Pieces of the columns of a table get the same ids, and equal samples reach replicas.
    """
    return tuple(sorted((s.table, *s.rows, s.num_cols, s.replicated, s.precision) for s in shards))


class RankTimer:
    """Measures the shards of ranks, or takes the measurement from the store.

    Args:
        limit_bytes: memory for a rank's weights; larger ranks are folded.
    """

    def __init__(self, bench: RankBench, store: Store, ids: ShardIds, *, limit_bytes: int) -> None:
        self._bench = bench
        self._store = store
        self._ids = ids
        self._limit_bytes = limit_bytes

    def time(self, shards: Sequence[Shard]) -> RankTimes:
        """Return the computation of shards that share a rank."""
        folded, ids = fold(shards, self._ids, limit_bytes=self._limit_bytes)
        key = self._store.key("rank", shapes(shards))
        known = _from_store(self._store.get(key))
        if known is not None:
            return known
        measured = self._bench.measure(folded, ids)
        times = RankTimes(
            measured.fwd_compute_ms, measured.bwd_compute_ms, MEASURED, len(ids.unfolded)
        )
        self._store.put(key, dataclasses.asdict(times))
        return times


def _from_store(values: Mapping[str, Any] | None) -> RankTimes | None:
    """Return a measurement of the store; None if it is missing or no measurement."""
    if values is None:
        return None
    try:
        times = RankTimes(**values)
        positive = all(0 < getattr(times, f"{stage}_ms") < math.inf for stage in COMPUTATION)
    except TypeError:
        return None
    return times if positive and times.origin == MEASURED else None


def affordable_ranks(predicted: PlanCost, config: MeasureConfig, *, minutes: float) -> int:
    """Return how many ranks can be measured in a time, at least two, by their predicted times."""
    computing_s = np.array([_computation_ms(rank) / 1e3 for rank in predicted.per_rank])
    longest_s = (config.iterations + config.warmup) * computing_s
    measuring_s = np.clip(longest_s, None, np.maximum(config.time_budget_s, 4 * computing_s))
    by_length = np.sort(measuring_s + SETUP_S)[::-1]
    # half of the measured ranks are the costliest ones, and the others are like the mean
    spent_s = np.cumsum(by_length) / 2 + by_length.mean() * np.arange(1, len(by_length) + 1) / 2
    return max(2, int((spent_s <= 60 * minutes).sum()))


def ranks_to_measure(
    candidates: Sequence[int], predicted: PlanCost, *, count: int, seed: int
) -> tuple[list[int], list[int]]:
    """Return the costliest ranks by their prediction, and a random sample of the others.

    Args:
        candidates: ranks with different shards.
        count: number of ranks to choose; if there are no more candidates, all are in the sample.
    """
    if len(candidates) <= count:
        return [], list(candidates)
    by_cost = sorted(candidates, key=lambda rank: -_computation_ms(predicted.per_rank[rank]))
    num_costliest = count // 2
    rng = np.random.default_rng([seed, len(candidates)])
    others = sorted(by_cost[num_costliest:])
    sample = rng.choice(others, count - num_costliest, replace=False)
    return sorted(by_cost[:num_costliest]), sorted(sample.tolist())


def time_ranks(
    plan: ShardingPlan,
    predicted: PlanCost,
    timer: RankTimer,
    *,
    count: int,
    seed: int,
    name: str,
) -> tuple[RankTimes, ...]:
    """Measure ranks of a plan one after the other, and scale the predictions of those left out.

    Args:
        count: largest number of ranks to measure.
        name: what messages call the plan.
    """
    by_rank = shards_by_rank(plan)
    first_with: dict[tuple[tuple[Any, ...], ...], int] = {}
    for rank, shards in enumerate(by_rank):
        if shards:
            first_with.setdefault(shapes(shards), rank)
    costliest, sample = ranks_to_measure(
        list(first_with.values()), predicted, count=count, seed=seed
    )
    measured: dict[int, RankTimes] = {}
    chosen = sorted({*costliest, *sample})
    progress = Progress(name, len(chosen))
    for rank in chosen:
        measured[rank] = timer.time(by_rank[rank])
        progress.add()
    ratios = _ratios(measured, predicted, sample)

    def times_of(rank: int) -> RankTimes:
        if not by_rank[rank]:
            return RankTimes(0.0, 0.0, EMPTY)
        first = first_with[shapes(by_rank[rank])]
        if rank in measured:
            return measured[rank]
        if first in measured:
            return dataclasses.replace(measured[first], origin=EQUAL)
        stages = predicted.per_rank[rank]
        forward, backward = (ratios[stage] * stages.stage_ms(stage) for stage in COMPUTATION)
        return RankTimes(forward, backward, SCALED)

    return tuple(map(times_of, range(plan.world_size)))


def priced_ranks(predicted: PlanCost) -> tuple[RankTimes, ...]:
    """Return the predicted computation of all ranks."""
    return tuple(
        RankTimes(rank.fwd_compute_ms, rank.bwd_compute_ms, PRICED) for rank in predicted.per_rank
    )


def with_times(
    predicted: PlanCost, ranks: Sequence[RankTimes], added_ms: Sequence[float] | None = None
) -> PlanCost:
    """Return a predicted cost with the computation of ranks in the place of the prediction.

    Args:
        added_ms: time of each rank that its forward computation does not contain; None for none.
    """
    added = added_ms or (0.0,) * len(ranks)
    return dataclasses.replace(
        predicted,
        per_rank=tuple(
            dataclasses.replace(
                stages,
                fwd_compute_ms=times.fwd_compute_ms + extra_ms,
                bwd_compute_ms=times.bwd_compute_ms,
            )
            for stages, times, extra_ms in zip(predicted.per_rank, ranks, added, strict=True)
        ),
    )


def _ratios(
    measured: Mapping[int, RankTimes], predicted: PlanCost, sample: Sequence[int]
) -> dict[str, float]:
    """Return the measured time relative to the predicted one in the sample, by stage."""
    ratios = {}
    for stage in COMPUTATION:
        expected_ms = sum(predicted.per_rank[rank].stage_ms(stage) for rank in sample)
        measured_ms = sum(float(getattr(measured[rank], f"{stage}_ms")) for rank in sample)
        ratios[stage] = measured_ms / expected_ms if expected_ms > 0 else 1.0
    return ratios


def _computation_ms(cost: StageCost) -> float:
    return sum(cost.stage_ms(stage) for stage in COMPUTATION)
