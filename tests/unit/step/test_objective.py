"""The step as an objective: what is hidden, and whether ranks meet between two steps' lookups."""

import dataclasses

import pytest

from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.step.objective import HIDDEN_WEIGHT, StepObjective
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.step.pipelines import PIPELINES
from dlrm_sharded.step.prediction import DensePart, simulated_steps
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap

DENSE = DenseTimes(
    data_ms=0.5,
    bottom_forward_ms=1.0,
    top_forward_ms=4.0,
    top_backward_ms=7.0,
    bottom_backward_ms=2.0,
    optimizer_ms=0.25,
)
COST = PlanCost((StageCost(2.0, 3.0, 4.0, 5.0), StageCost(3.0, 3.0, 4.0, 4.0)))


def with_pipeline(name: str) -> Overlap:
    pipeline = PIPELINES[name]
    return dataclasses.replace(
        PIPELINED, next_ids=pipeline.next_ids, next_lookup=pipeline.next_lookup
    )


def objective_of(overlap: Overlap, cost: PlanCost = COST) -> StepObjective:
    part = DensePart((DENSE,) * len(cost.per_rank), all_reduce_ms=0.0)
    return StepObjective.near(
        cost, lambda changed: simulated_steps(changed, part, overlap=overlap).step_ms
    )


@pytest.mark.parametrize(
    ("overlap", "hidden_ms", "joins"),
    [
        (SERIAL, (0.0, 0.0), False),
        # vectors are exchanged beside the bottom layers, and their gradients beside those backward
        (with_pipeline("base"), (1.0, 2.0), True),
        (with_pipeline("sparse_dist"), (1.0, 2.0), True),
        # also beside the optimizer of the step before
        (with_pipeline("fused_sparse_dist"), (1.25, 2.0), True),
        # beside the backward pass of the top layers
        (with_pipeline("semi_sync"), (7.0, 2.0), True),
    ],
    ids=["serial", "base", "sparse_dist", "fused_sparse_dist", "semi_sync"],
)
def test_follows_from_the_pipeline(
    overlap: Overlap, hidden_ms: tuple[float, float], joins: bool
) -> None:
    found = objective_of(overlap)
    assert found.hidden_ms == pytest.approx(hidden_ms)
    assert found.joins_computation == joins


def test_one_rank_meets_nobody() -> None:
    alone = PlanCost(COST.per_rank[:1])
    assert not objective_of(SERIAL, alone).joins_computation
    assert objective_of(SERIAL, alone).hidden_ms == (0.0, 0.0)


def test_exposed_and_its_slope() -> None:
    objective = StepObjective((1.0, 2.0), joins_computation=True)
    assert objective.exposed_ms(1.0) == pytest.approx(HIDDEN_WEIGHT)
    # one exchange of 1.5 ms exceeds what is hidden by 0.5 ms, the other one of 10 ms by 8 and 9
    assert objective.exposed_ms(3.0) == pytest.approx(0.5 + HIDDEN_WEIGHT * 2.5)
    assert objective.exposed_ms(20.0) == pytest.approx(17.0 + HIDDEN_WEIGHT * 3.0)
    for exchange_ms in (0.0, 1.9, 2.0, 3.0, 4.1, 50.0):
        value_ms, slope = objective.smooth_exposed_ms(exchange_ms)
        later_ms, _ = objective.smooth_exposed_ms(exchange_ms + 1e-5)
        assert (later_ms - value_ms) / 1e-5 == pytest.approx(slope, rel=1e-3)
        assert 0.0 <= value_ms - objective.exposed_ms(exchange_ms) < 0.2


def test_where_nothing_is_hidden_exchanges_count_in_full() -> None:
    objective = StepObjective((0.0, 0.0), joins_computation=False)
    for exchange_ms in (0.0, 0.3, 7.0):
        assert objective.exposed_ms(exchange_ms) == pytest.approx(exchange_ms)
        assert objective.smooth_exposed_ms(exchange_ms)[0] == pytest.approx(exchange_ms)
    assert objective.smooth_exposed_ms(1.0)[1] == pytest.approx(1.0)
