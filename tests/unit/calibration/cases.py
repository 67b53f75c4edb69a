"""Samples made by hand, and samples of hardware of another speed."""

import dataclasses
from collections.abc import Iterable, Mapping

from dlrm_sharded.calibration.samples import MeasuredShard, Sample
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost, StageCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS

HISTOGRAM = (0.5, 0.25, 0.25, *(0.0,) * (NUM_REUSE_BINS - 3))


def sample(
    number: int = 0,
    *,
    kind: str = "computation",
    times_ms: tuple[tuple[float, float, float, float, float], ...] = ((1, 2, 3, 4, 5),) * 2,
    ranks: tuple[int, ...] = (0, 1, 1),
) -> Sample:
    """A sample whose times are given rank by rank, in the order of `TIMES`."""
    return Sample(
        kind=kind,
        number=number,
        world_size=len(times_ms),
        ranks_per_host=len(times_ms),
        batch_size=1024,
        shards=tuple(
            MeasuredShard(rank, 1000 + number + i, 4 * i, 0.1 * i, HISTOGRAM, row_wise=i == 3)
            for i, rank in enumerate(ranks, start=1)
        ),
        cost=PlanCost(
            tuple(StageCost(*map(float, rank[1:])) for rank in times_ms),
            input_dist_ms=tuple(float(rank[0]) for rank in times_ms),
        ),
    )


ELSEWHERE = {
    "fwd_compute": 2.0,
    "fwd_comm": 1.8,
    "bwd_comm": 1.8,
    "bwd_compute": 5.0,
    "input_dist": 1.3,
}


def on_other_hardware(
    samples: Iterable[Sample], factors: Mapping[str, float] | float
) -> list[Sample]:
    """The samples at so many times the time, of each stage or of all."""
    if isinstance(factors, float):
        factors = dict.fromkeys(ELSEWHERE, factors)
    return [dataclasses.replace(of, cost=_times(of.cost, factors)) for of in samples]


def _times(cost: PlanCost, factors: Mapping[str, float]) -> PlanCost:
    stages = {
        stage: [factors[stage] * rank.stage_ms(stage) for rank in cost.per_rank] for stage in STAGES
    }
    input_dist_ms = [factors["input_dist"] * ms for ms in cost.input_dist_ms]
    return PlanCost.from_stages(stages, input_dist_ms=input_dist_ms)
