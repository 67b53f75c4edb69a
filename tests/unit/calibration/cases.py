"""Samples made by hand."""

from dlrm_sharded.calibration.samples import MeasuredShard, Sample
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS

HISTOGRAM = (0.5, 0.25, 0.25, *(0.0,) * (NUM_REUSE_BINS - 3))


def sample(
    number: int = 0,
    *,
    kind: str = "computation",
    attempt: int = 0,
    times_ms: tuple[tuple[float, float, float, float, float], ...] = ((1, 2, 3, 4, 5),) * 2,
    ranks: tuple[int, ...] = (0, 1, 1),
) -> Sample:
    """A sample whose times are given rank by rank, in the order of `TIMES`."""
    return Sample(
        kind=kind,
        number=number,
        attempt=attempt,
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
