"""Adapting a model to hardware that it was not fitted to: the made-up one with other speeds."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from dlrm_sharded.calibration.adapt import adapt, error_of, fit_factors
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plan_cost import STAGES, PlanCost
from tests.unit.cost.hardware import measured_plans

ELSEWHERE = {
    "fwd_compute": 2.0,
    "fwd_comm": 1.8,
    "bwd_comm": 1.8,
    "bwd_compute": 5.0,
    "input_dist": 1.3,
}


def on_other_hardware(samples: Sequence[Sample], factors: Mapping[str, float]) -> list[Sample]:
    return [dataclasses.replace(sample, cost=times(sample.cost, factors)) for sample in samples]


def times(cost: PlanCost, factors: Mapping[str, float]) -> PlanCost:
    assert cost.input_dist_ms is not None
    return PlanCost.from_stages(
        {
            stage: [factors[stage] * rank.stage_ms(stage) for rank in cost.per_rank]
            for stage in STAGES
        },
        input_dist_ms=[factors["input_dist"] * ms for ms in cost.input_dist_ms],
    )


@pytest.fixture(scope="module")
def plans() -> list[Sample]:
    return list(measured_plans(40, 0, seed=3))


def test_one_plan_tells_how_fast_the_hardware_is(
    model: LearnedCostModel, plans: list[Sample]
) -> None:
    elsewhere = on_other_hardware(plans, ELSEWHERE)
    assert error_of(model, elsewhere) > 2.0
    adapted = adapt(model, elsewhere[:1])
    assert adapted.error_after < 0.2 < adapted.error_before
    assert error_of(adapted.model, elsewhere) < 0.4
    assert adapted.expected_error >= 0.3, "one plan cannot tell how others will be"
    twice = adapt(model, elsewhere[:1] * 2)
    assert twice.expected_error < 0.1 < twice.stated_error < 0.3, "two may agree by chance"


def test_more_plans_tell_more(model: LearnedCostModel, plans: list[Sample]) -> None:
    elsewhere = on_other_hardware(plans, ELSEWHERE)
    many = adapt(model, elsewhere[:20])
    of_one = [error_of(adapt(model, [plan]).model, elsewhere[20:]) for plan in elsewhere[:5]]
    assert error_of(many.model, elsewhere[20:]) < np.mean(of_one)
    assert error_of(many.model, elsewhere[20:]) < 0.1
    assert many.expected_error == pytest.approx(error_of(many.model, elsewhere[20:]), abs=0.1)


def test_a_stage_that_behaves_otherwise_is_found(
    model: LearnedCostModel, plans: list[Sample]
) -> None:
    """Hardware on which only backward computation is slower."""
    slow_backward = dict.fromkeys(ELSEWHERE, 1.0) | {"bwd_compute": 5.0}
    factors = fit_factors(model, on_other_hardware(plans, slow_backward))
    forward, backward = factors.compute
    adapted = factors.applied(model)
    before, after = (of.compute.launch_ms(np.ones(1))[0] for of in (model, adapted))
    assert forward.mean() == pytest.approx(1.0, abs=0.15)
    assert backward.mean() == pytest.approx(5.0, rel=0.2)
    assert (after / before)[1] > 2.0


def test_an_absurd_time_does_not_decide(model: LearnedCostModel, plans: list[Sample]) -> None:
    sound = on_other_hardware(plans[:10], ELSEWHERE)
    absurd = on_other_hardware(plans[10:11], dict.fromkeys(ELSEWHERE, 1e6))
    adapted = adapt(model, [*sound, *absurd])
    others = on_other_hardware(plans[11:], ELSEWHERE)
    assert error_of(adapted.model, others) < 0.5


def test_the_right_model_stays(model: LearnedCostModel, plans: list[Sample]) -> None:
    adapted = adapt(model, plans[:10])
    assert error_of(adapted.model, plans[10:]) < error_of(model, plans[10:]) + 0.03


def test_exchanges_are_adapted_too(model: LearnedCostModel) -> None:
    exchanging = list(measured_plans(0, 30, seed=4))
    factors = fit_factors(model, on_other_hardware(exchanging, ELSEWHERE))
    adapted = factors.applied(model)
    for kind in STAGES[1:3]:
        errors = [
            adapted.predict_trial(workload_of_sample(plan)).stage_max_ms(kind)
            / plan.cost.stage_max_ms(kind)
            for plan in on_other_hardware(exchanging, ELSEWHERE)
        ]
        assert np.median(errors) == pytest.approx(1.0, abs=0.1)
