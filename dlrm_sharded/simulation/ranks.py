"""The computation of every rank under a plan: measured, taken from an equal rank, or scaled."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from dlrm_sharded.files.errors import DataError, check_number
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Count, NotNegative
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.fitting.samples import MAX_STAGE_MS
from dlrm_sharded.measuring.rank_bench import (
    RankBench,
    ShardIds,
    median_stages,
    with_measured,
)
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import (
    COMPUTE_STAGES,
    EXCHANGE_STAGES,
    FWD_COMPUTE,
    NO_COST,
    PlanCost,
    StageCost,
)
from dlrm_sharded.ranks.process import release_freed_memory
from dlrm_sharded.ranks.surroundings import core_wait_s
from dlrm_sharded.simulation.folding import fold
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.store import Store

log = logging.getLogger(__name__)

MEASURED, EQUAL, SCALED, PRICED, EMPTY = "measured", "equal", "scaled", "priced", "empty"
ORIGINS = (MEASURED, EQUAL, SCALED, PRICED, EMPTY)
"""How a rank's computation is known: it was measured here, or taken from a rank whose shards have
the same shapes and ids; predicted and scaled, or priced by a prior; the rank has no shards."""

MIN_MEASURED = 4
"""Number of ranks of a plan that are measured, however long that takes."""

MEASUREMENTS = 3
"""Measurements of a rank that is the slowest one; their median counts."""

AGAIN_S = 0.5
"""Time after which a measurement that goes on is stopped again."""

BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

Shapes = tuple[tuple[Any, ...], ...]
"""Key of ranks that compute equally long, see `shapes`."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The computation of one rank.

    Args:
        stages: times; those of `COMPUTE_STAGES` count.
        origin: one of `ORIGINS`.
        num_folded: shards that had fewer rows in the measurement than in the plan.
        seconds: time that its measurements took, with all that they need.
        core_wait_s: time of it in which other processes had the core.
        measurements: number of measurements whose median this is.
        host_ms: time that the host took for the lookups and their exchanges on a GPU; 0 if that was
            not measured.
    """

    stages: StageCost
    origin: str
    num_folded: Count = 0
    seconds: NotNegative = 0.0
    core_wait_s: NotNegative = 0.0
    measurements: Count = 1
    host_ms: NotNegative = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the form of a measurement in the store."""
        fields = dataclasses.asdict(self)
        del fields["stages"]
        return {f"{stage}_ms": self.stages.stage_ms(stage) for stage in COMPUTE_STAGES} | fields


def shapes(shards: Sequence[Shard]) -> Shapes:
    """Return what decides a rank's computation; equal for ranks that compute the same.

    Pieces of the columns of a table get the same ids, and equal samples reach replicas.
    """
    return tuple(sorted((s.table, *s.rows, s.num_cols, s.replicated, s.precision) for s in shards))


class OutOfTimeError(Exception):
    """The time for measurements is over."""


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

    def time(self, shards: Sequence[Shard], repeat: int, limit_s: float) -> RankTimes:
        """Return the computation of shards that share a rank.

        Args:
            repeat: number of earlier measurements of the same shards.
            limit_s: time after which the measurement is stopped.

        Raises:
            OutOfTimeError: it was stopped.
        """
        return self._store.kept(
            "a rank",
            ["rank", shapes(shards), *([repeat] if repeat else [])],
            read=stored_times,
            measure=lambda: self._measured(shards, limit_s),
        )

    def _measured(self, shards: Sequence[Shard], limit_s: float) -> RankTimes:
        folded, ids = fold(shards, self._ids, limit_bytes=self._limit_bytes)
        started, waited_s = time.monotonic(), core_wait_s()
        try:
            with time_limit(limit_s):
                measured = self._bench.measure_all(folded, ids)
            [stages] = measured.cost.per_rank
            return RankTimes(
                stages.with_stages(dict.fromkeys(EXCHANGE_STAGES, 0.0)),
                MEASURED,
                host_ms=measured.host_ms,
                num_folded=len(ids.unfolded),
                seconds=round(time.monotonic() - started, 1),
                core_wait_s=round(core_wait_s() - waited_s, 2),
            )
        finally:
            # modules are in reference cycles, and hold the ids of a rank until these are collected
            gc.collect()
            release_freed_memory()


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block, between two operations of torch, if it takes longer."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    # 0 sets no alarm; one that falls into a destructor is lost there, so another one follows
    signal.setitimer(signal.ITIMER_REAL, limit_s if limit_s < math.inf else 0, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def stored_times(values: Mapping[str, Any]) -> RankTimes:
    """Return a measurement of the store.

    Raises:
        LookupError, ConfigError, DataError: a value is missing, or no measurement gives it.
    """
    others, times_ms = dict(values), {}
    for stage in COMPUTE_STAGES:
        times_ms[stage] = others.pop(f"{stage}_ms")
        check_number(stage, times_ms[stage], most=MAX_STAGE_MS, above=True)
    others["stages"] = NO_COST.with_stages(times_ms).to_json()
    times = read_form(others, RankTimes, name="the times of a rank")
    if times.origin != MEASURED:
        raise DataError(f"its origin is {times.origin}")
    return times


def by_priority(candidates: Sequence[int], predicted: PlanCost, *, seed: int) -> list[int]:
    """Return ranks in the order in which they are to be measured: costly, random, costly, ...

    The ranks in even places are the costliest by their prediction, and those in odd places are a
    random sample of the others, however many of the order are measured.

    Args:
        candidates: ranks with different shards.
    """
    costly = sorted(candidates, key=lambda rank: -predicted.per_rank[rank].computation_ms)
    drawn = np.random.default_rng([seed, len(costly)]).permutation(sorted(candidates)).tolist()
    order: dict[int, None] = {}
    while len(order) < len(costly):
        source = drawn if len(order) % 2 else costly
        order[next(rank for rank in source if rank not in order)] = None
    return list(order)


def time_ranks(
    planned: Planned,
    time_shards: Callable[[Sequence[Shard], int, float], RankTimes],
    *,
    count: int | None = None,
    seconds: float = math.inf,
    seed: int,
) -> tuple[RankTimes, ...]:
    """Measure ranks of a plan one after the other, and scale the predictions of those left out.

    The slowest rank of each stage is measured again until it is the slowest by `MEASUREMENTS` of
    them: a step takes as long as that rank, so a single disturbed measurement would decide it.

    Args:
        time_shards: measures shards that share a rank, see `RankTimer.time`.
        count: largest number of ranks to measure; None for all.
        seconds: time of all measurements. It ends the one that runs, though not before
            `MIN_MEASURED` ranks are measured.
    """
    by_rank, predicted = planned.plan.shards_by_rank(), planned.cost
    first_with: dict[Shapes, int] = {}
    for rank, shards in enumerate(by_rank):
        if shards:
            first_with.setdefault(shapes(shards), rank)
    order = by_priority(list(first_with.values()), predicted, seed=seed)[:count]
    found = _measured_in_time(
        order,
        lambda rank, repeat, limit_s: time_shards(by_rank[rank], repeat, limit_s),
        seconds=seconds,
        name=planned.sharder,
    )
    measured = {rank: _median(times) for rank, times in found.items()}
    ratios = _ratios(measured, predicted)

    def times_of(rank: int) -> RankTimes:
        if not by_rank[rank]:
            return RankTimes(NO_COST, EMPTY)
        if rank in measured:
            return measured[rank]
        first = first_with[shapes(by_rank[rank])]
        if first in measured:
            return dataclasses.replace(measured[first], origin=EQUAL)
        stages = predicted.per_rank[rank]
        scaled = {stage: ratio * stages.stage_ms(stage) for stage, ratio in ratios.items()}
        return RankTimes(stages.with_stages(scaled), SCALED)

    return tuple(map(times_of, range(len(by_rank))))


def _measured_in_time(
    order: Sequence[int],
    time_rank: Callable[[int, int, float], RankTimes],
    *,
    seconds: float,
    name: str,
) -> dict[int, list[RankTimes]]:
    """Return the measurements of ranks in their order, as far as the time allows.

    Args:
        time_rank: measures a rank that has been measured so many times, within some seconds.
    """
    found: dict[int, list[RankTimes]] = {}
    spent_s = 0.0
    with ProgressBar(total=1.0, desc=name, bar_format=BAR_FORMAT) as bar:

        def measure(rank: int) -> None:
            nonlocal spent_s
            repeat = len(found.get(rank, ()))
            is_due = repeat == 0 and len(found) < MIN_MEASURED
            limit_s = math.inf if is_due else seconds - spent_s
            if limit_s <= 0:
                raise OutOfTimeError
            times = time_rank(rank, repeat, limit_s)
            found.setdefault(rank, []).append(times)
            spent_s += times.seconds
            bar.set_postfix_str(f"{len(found)} of up to {len(order)} ranks", refresh=False)
            # either limit may end the measurements
            done = max(len(found) / len(order), spent_s / seconds if seconds else 1.0)
            bar.update(min(done, 1.0) - bar.n)

        try:
            for rank in order:
                measure(rank)
            for _ in order:  # at most twice the time, if all ranks are alike
                if (slowest := _slowest_in_doubt(found)) is None:
                    break
                measure(slowest)
        except OutOfTimeError:
            text = "%s: the time is over, and %d of up to %d ranks are measured"
            log.info(text, name, len(found), len(order))
    return found


def _slowest_in_doubt(found: Mapping[int, Sequence[RankTimes]]) -> int | None:
    """Return a rank that is slowest in a stage by fewer than `MEASUREMENTS`; None if none is."""
    for stage in COMPUTE_STAGES:
        slowest = max(
            found, key=lambda rank: median(times.stages.stage_ms(stage) for times in found[rank])
        )
        if len(found[slowest]) < MEASUREMENTS:
            return slowest
    return None


def _median(measurements: Sequence[RankTimes]) -> RankTimes:
    medians = median_stages([times.stages for times in measurements])
    return dataclasses.replace(
        measurements[0],
        stages=measurements[0].stages.with_stages(medians),
        seconds=sum(times.seconds for times in measurements),
        core_wait_s=sum(times.core_wait_s for times in measurements),
        measurements=len(measurements),
        host_ms=median(times.host_ms for times in measurements),
    )


def priced_ranks(predicted: PlanCost) -> tuple[RankTimes, ...]:
    """Return the predicted computation of all ranks."""
    return tuple(RankTimes(stages, PRICED) for stages in predicted.per_rank)


def with_times(
    predicted: PlanCost, ranks: Sequence[RankTimes], added_ms: Sequence[float] | None = None
) -> PlanCost:
    """Return a predicted cost with the computation of ranks in the place of the prediction.

    Args:
        added_ms: time of each rank that its forward computation does not contain; None for none.
    """
    cost = with_measured(predicted, [[times.stages] for times in ranks])
    return cost.with_added(FWD_COMPUTE, added_ms) if added_ms else cost


def _ratios(measured: Mapping[int, RankTimes], predicted: PlanCost) -> dict[str, float]:
    """Return the measured time relative to the predicted one in the random sample, by stage."""
    sample = list(measured)[1::2] or list(measured)  # see `by_priority`
    ratios = {}
    for stage in COMPUTE_STAGES:
        expected_ms = sum(predicted.per_rank[rank].stage_ms(stage) for rank in sample)
        measured_ms = sum(measured[rank].stages.stage_ms(stage) for rank in sample)
        ratios[stage] = measured_ms / expected_ms if expected_ms > 0 else 1.0
    return ratios
