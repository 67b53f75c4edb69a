"""Which ranks are measured, and what the others are taken to compute."""

import contextlib
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.simulation import ranks
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.ranks import (
    MIN_MEASURED,
    RankTimer,
    RankTimes,
    by_priority,
    priced_ranks,
    shapes,
    stored_times,
    time_limit,
    time_ranks,
    with_times,
)
from dlrm_sharded.simulation.store import Store

NUM_RANKS = 12


def predicted(num_ranks: int = NUM_RANKS) -> PlanCost:
    """Rank r computes r + 1 ms forward and twice that backward."""
    return PlanCost(tuple(StageCost(r + 1.0, 5.0, 6.0, 2.0 * (r + 1)) for r in range(num_ranks)))


def planned(*shards: Shard, num_ranks: int = NUM_RANKS) -> Planned:
    """A plan with these shards, or with a table on each rank."""
    each = tuple(Shard(f"t{rank}", rank, (0, 10), (0, 4)) for rank in range(num_ranks))
    plan = ShardingPlan(num_ranks, shards or each)
    return Planned("x", plan, PlanReport("x", 0.1, predicted(num_ranks)))


def computed(forward_ms: float, backward_ms: float, **others: Any) -> RankTimes:
    return RankTimes(StageCost(forward_ms, 0.0, 0.0, backward_ms), "measured", **others)


def three_times_predicted(
    shards: Sequence[Shard], repeat: int = 0, limit_s: float = 0.0
) -> RankTimes:
    number = int(shards[0].table[1:]) + 1
    return computed(3.0 * number, 6.0 * number)


def test_all_ranks_are_measured_if_they_may_be() -> None:
    times = time_ranks(planned(), three_times_predicted, count=NUM_RANKS, seed=0)
    assert {rank.origin for rank in times} == {"measured"}
    assert times[4] == computed(15.0, 30.0)


def test_other_ranks_are_scaled_by_a_sample() -> None:
    times = time_ranks(planned(), three_times_predicted, count=6, seed=0)
    origins = [rank.origin for rank in times]
    assert origins.count("measured") == 6
    assert origins[-3:] == ["measured"] * 3  # the costliest
    for rank, found in enumerate(times):
        assert found.stages.fwd_compute_ms == pytest.approx(3.0 * (rank + 1))
        assert found.stages.bwd_compute_ms == pytest.approx(6.0 * (rank + 1))
    assert time_ranks(planned(), three_times_predicted, count=6, seed=0) == times


@pytest.mark.parametrize(
    "change",
    [
        {"fwd_compute_ms": 1e308},
        {"fwd_compute_ms": float("nan")},
        {"fwd_compute_ms": "3"},
        {"bwd_compute_ms": 0.0},
        {"bwd_compute_ms": 10**400},
        {"seconds": None},
        {"unknown": 1.0},
        {"origin": "scaled"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_times_that_no_measurement_gives_are_measured_again(change: dict[str, object]) -> None:
    fields = computed(3.0, 6.0, seconds=1.0).to_json()
    assert stored_times(fields) == computed(3.0, 6.0, seconds=1.0)
    with pytest.raises((LookupError, ConfigError, DataError)):
        stored_times(fields | change)


def test_the_hosts_time_of_a_rank_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = MeasuredCost(PlanCost((StageCost(1.0, 9.0, 9.0, 2.0),)), {}, 1, host_ms=0.75)
    bench: Any = SimpleNamespace(measure_all=lambda shards, ids: measured)
    ids: Any = SimpleNamespace(unfolded=())
    monkeypatch.setattr(ranks, "fold", lambda shards, ids, limit_bytes: (shards, ids))
    shards = [Shard("t0", 0, (0, 10), (0, 4))]
    for _ in range(2):  # the second time from the file
        with contextlib.closing(Store(tmp_path / "out", {})) as store:
            found = RankTimer(bench, store, ids, limit_bytes=100).time(shards, 0, math.inf)
        assert found.host_ms == 0.75
        assert found.stages == StageCost(1.0, 0.0, 0.0, 2.0), "exchanges are predicted"
        bench = None


def test_equal_ranks_are_measured_once() -> None:
    columns = [Shard("t0", rank, (0, 10), (4 * rank, 4 * rank + 4)) for rank in range(3)]
    replicas = [Shard("t1", rank, (0, 9), (0, 4), replicated=True) for rank in (3, 4)]
    blocks = [Shard("t2", rank, (10 * rank, 10 * rank + 10), (0, 4)) for rank in (5, 6)]
    plan = planned(*columns, *replicas, *blocks, num_ranks=8)
    calls: list[Sequence[Shard]] = []

    def measure(shards: Sequence[Shard], repeat: int, limit_s: float) -> RankTimes:
        if repeat == 0:
            calls.append(shards)
        return three_times_predicted(shards)

    times = time_ranks(plan, measure, count=8, seed=0)
    assert [rank.origin for rank in times] == [
        *("measured", "equal", "equal", "measured", "equal", "measured", "measured", "empty")
    ]
    assert len(calls) == 4
    assert times[7].stages.total_ms == 0.0


def test_shapes_tell_precisions_apart() -> None:
    shard = Shard("t0", 0, (0, 10), (0, 4))
    half = dataclasses.replace(shard, precision="fp16")
    assert shapes([shard]) != shapes([half])
    assert shapes([shard]) == shapes([dataclasses.replace(shard, rank=5)])


def test_every_second_rank_is_costly() -> None:
    order = by_priority(range(NUM_RANKS), predicted(), seed=3)
    assert sorted(order) == list(range(NUM_RANKS))
    assert order[0] == NUM_RANKS - 1
    for place in range(0, NUM_RANKS, 2):
        assert order[place] == max(order[place:])


@pytest.mark.parametrize(("seconds", "num_measured"), [(0.0, 4), (25.0, 5), (1000.0, 12)])
def test_ranks_are_measured_while_there_is_time(seconds: float, num_measured: int) -> None:
    def measure(shards: Sequence[Shard], repeat: int, limit_s: float) -> RankTimes:
        return dataclasses.replace(three_times_predicted(shards), seconds=5.0)

    times = time_ranks(planned(), measure, seconds=seconds, seed=0)
    assert [rank.origin for rank in times].count("measured") == num_measured


def test_a_measurement_is_stopped_when_the_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    limits_s: list[float] = []

    def measure(shards: Sequence[Shard], repeat: int, limit_s: float) -> RankTimes:
        limits_s.append(limit_s)
        if len(limits_s) == 6:
            with time_limit(0.05):
                time.sleep(600)
        return dataclasses.replace(three_times_predicted(shards), seconds=5.0)

    with caplog.at_level(logging.INFO):
        times = time_ranks(planned(), measure, seconds=26.0, seed=0)
    assert limits_s == [math.inf] * MIN_MEASURED + [6.0, 1.0]
    assert [rank.origin for rank in times].count("measured") == 5
    assert "x: the time is over, and 5 of up to 12 ranks are measured" in caplog.text
    with time_limit(math.inf):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("stage", COMPUTE_STAGES)
def test_a_disturbed_measurement_does_not_decide_the_step(stage: str) -> None:
    def measure(shards: Sequence[Shard], repeat: int, limit_s: float) -> RankTimes:
        true = three_times_predicted(shards)
        disturbed = shards[0].table == "t3" and repeat == 0
        stages = true.stages.with_stages({stage: 1000.0})
        return dataclasses.replace(true, stages=stages) if disturbed else true

    times = time_ranks(planned(), measure, seed=0)
    assert times[3] == computed(12.0, 24.0, measurements=3)
    assert times[NUM_RANKS - 1].measurements == 3  # the slowest, once rank 3 is not
    assert sum(rank.measurements for rank in times) == NUM_RANKS + 4


def test_a_rank_that_is_slow_each_time_stays_slow() -> None:
    def measure(shards: Sequence[Shard], repeat: int, limit_s: float) -> RankTimes:
        slow = shards[0].table == "t3"
        return computed(500.0 + repeat, 900.0 - repeat) if slow else computed(1.0, 2.0)

    times = time_ranks(planned(), measure, seed=0)
    assert times[3] == computed(501.0, 899.0, measurements=3)
    assert sum(rank.measurements for rank in times) == NUM_RANKS + 2


def test_exchanges_stay_predicted() -> None:
    times = [computed(1.0, 2.0)] * NUM_RANKS
    cost = with_times(predicted(), times, [0.5] * NUM_RANKS)
    assert cost.per_rank[7] == StageCost(1.5, 5.0, 6.0, 2.0)
    assert with_times(predicted(), priced_ranks(predicted())) == predicted()
