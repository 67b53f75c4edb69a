"""Adapting a model to hardware that it was not fitted to: the made-up one with other speeds."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest

from dlrm_sharded.calibration.adapt import Adapted, adapt, error_of
from dlrm_sharded.calibration.factor_fit import fit_factors
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from tests.unit.cost.hardware import measured_plans

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
    return [dataclasses.replace(sample, cost=times(sample.cost, factors)) for sample in samples]


def times(cost: PlanCost, factors: Mapping[str, float]) -> PlanCost:
    stages = {
        stage: [factors[stage] * rank.stage_ms(stage) for rank in cost.per_rank] for stage in STAGES
    }
    input_dist_ms = [factors["input_dist"] * ms for ms in cost.input_dist_ms]
    return PlanCost.from_stages(stages, input_dist_ms=input_dist_ms)


def critical_path_ms(model: LearnedCostModel, sample: Sample) -> float:
    return model.predict_trial(workload_of_sample(sample)).critical_path_ms


PLANS = measured_plans(40, 0, seed=3)


def test_one_plan_tells_how_fast_the_hardware_is(model: LearnedCostModel) -> None:
    elsewhere = on_other_hardware(PLANS, ELSEWHERE)
    assert error_of(model, elsewhere) > 2.0
    adapted = adapt(model, elsewhere[:1])
    assert adapted.error_after < 0.2 < adapted.error_before
    assert error_of(adapted.model, elsewhere) < 0.4
    assert adapted.expected_error >= 0.3, "one plan cannot tell how others will be"
    twice = adapt(model, elsewhere[:1] * 2)
    assert twice.expected_error < 0.1 < twice.stated_error < 0.3, "two may agree by chance"


def test_a_stage_that_behaves_otherwise_is_found(model: LearnedCostModel) -> None:
    """Hardware on which only backward computation is slower."""
    slow_backward = dict.fromkeys(ELSEWHERE, 1.0) | {"bwd_compute": 5.0}
    factors = fit_factors(model, on_other_hardware(PLANS, slow_backward))
    forward, backward = factors.compute
    adapted = factors.applied(model)
    before, after = (of.compute.launch_ms(np.ones(1))[0] for of in (model, adapted))
    assert forward.mean() == pytest.approx(1.0, abs=0.15)
    assert backward.mean() == pytest.approx(5.0, rel=0.2)
    assert (after / before)[1] > 2.0


def edited(
    factors: Mapping[str, float], *, rank: int | None = None
) -> Callable[[Sample], list[Sample]]:
    """Multiply stages of a sample, on one rank or on all, the other times being kept."""

    def edit(sample: Sample) -> list[Sample]:
        [all_ranks] = on_other_hardware([sample], dict.fromkeys(ELSEWHERE, 1.0) | dict(factors))
        if rank is None:
            return [all_ranks]
        per_rank, input_dist_ms = list(sample.cost.per_rank), sample.cost.input_dist_ms
        per_rank[rank] = all_ranks.cost.per_rank[rank]
        return [dataclasses.replace(sample, cost=PlanCost(tuple(per_rank), input_dist_ms))]

    return edit


ABSURD = {
    "all_slow": edited(dict.fromkeys(ELSEWHERE, 1000.0)),
    "all_fast": edited(dict.fromkeys(ELSEWHERE, 1e-3)),
    "suspended_for_a_while": edited(dict.fromkeys(ELSEWHERE, 30.0)),
    "slow_stage": edited({"fwd_comm": 1e3}),
    "fast_stage_of_a_rank": edited({"bwd_compute": 1e-3}, rank=1),
    "no_time": edited({"bwd_comm": 0.0}),
    "slow_ids": edited({"input_dist": 1e4}),
}


@pytest.mark.parametrize("absurd", ABSURD.values(), ids=ABSURD)
@pytest.mark.parametrize(("num_plans", "place"), [(4, 4), (5, 0), (12, 6), (42, 41)])
def test_one_absurd_plan_changes_nothing(
    model: LearnedCostModel,
    honest: Callable[[int], Adapted],
    absurd: Callable[[Sample], list[Sample]],
    num_plans: int,
    place: int,
) -> None:
    sound = honest_plans(num_plans)
    [bad] = absurd(sound[-1])
    adapted = adapt(model, [*sound[:place], bad, *sound[place:]])
    without = honest(num_plans)
    assert [outlier.index for outlier in adapted.outliers] == [place]
    assert without.outliers == ()
    for key in ("error_before", "error_after", "expected_error", "stated_error"):
        assert getattr(adapted, key) == pytest.approx(getattr(without, key))
    expected_ms = critical_path_ms(without.model, sound[0])
    assert critical_path_ms(adapted.model, sound[0]) == pytest.approx(expected_ms)


def honest_plans(num_plans: int) -> list[Sample]:
    """Plans of computation and of exchanges, in turn."""
    plans = measured_plans(num_plans, num_plans // 2, seed=num_plans)
    return on_other_hardware(plans[-num_plans:], ELSEWHERE)


@pytest.fixture(scope="module")
def honest(model: LearnedCostModel) -> Callable[[int], Adapted]:
    return functools.cache(lambda num_plans: adapt(model, honest_plans(num_plans)))


@pytest.mark.parametrize(("num_slow", "num_left_out"), [(2, 2), (3, 0)])
def test_plans_that_agree_are_a_change_of_the_hardware(
    model: LearnedCostModel, num_slow: int, num_left_out: int
) -> None:
    """After which all stages take 20 times as long."""
    slow = on_other_hardware(PLANS[10 : 10 + num_slow], 20.0)
    assert len(adapt(model, [*PLANS[:10], *slow]).outliers) == num_left_out


def test_the_right_model_stays(model: LearnedCostModel) -> None:
    adapted = adapt(model, PLANS[:10])
    assert error_of(adapted.model, PLANS[10:]) < error_of(model, PLANS[10:]) + 0.03


def test_exchanges_are_adapted_too(model: LearnedCostModel) -> None:
    exchanging = on_other_hardware(measured_plans(0, 30, seed=4), ELSEWHERE)
    adapted = fit_factors(model, exchanging).applied(model)
    for kind in STAGES[1:3]:
        errors = [
            adapted.predict_trial(workload_of_sample(plan)).stage_max_ms(kind)
            / plan.cost.stage_max_ms(kind)
            for plan in exchanging
        ]
        assert np.median(errors) == pytest.approx(1.0, abs=0.1)


START = on_other_hardware(measured_plans(20, 10, seed=11), ELSEWHERE)
"""Plans that a first start measured on the other hardware."""

RUNS = on_other_hardware(measured_plans(10, 5, seed=12), ELSEWHERE)
TESTS = on_other_hardware(measured_plans(12, 0, seed=13), ELSEWHERE)


@pytest.fixture(scope="module")
def started(model: LearnedCostModel) -> LearnedCostModel:
    return fit_factors(model, START).applied(model)


SPOILED = {
    "all_stages": edited(dict.fromkeys(ELSEWHERE, 3.0)),
    "a_rank": edited(dict.fromkeys(ELSEWHERE, 2.0), rank=0),
    "backward": edited({"bwd_compute": 4.0}),
    "forward": edited({"fwd_compute": 0.3}),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("num_good", [0, 7])
def test_bad_runs_do_not_undo_a_first_start(
    model: LearnedCostModel,
    started: LearnedCostModel,
    spoil: Callable[[Sample], list[Sample]],
    num_good: int,
) -> None:
    """Up to three of ten, as the same fit has what was measured before."""
    for num_bad in (1, 3):
        bad = [spoiled for run in RUNS[7 : 7 + num_bad] for spoiled in spoil(run)]
        adapted = adapt(model, [*RUNS[:num_good], *bad], start=START)
        before, after = (error_of(of, TESTS) for of in (started, adapted.model))
        assert after < before + (0.03 if num_good else 0.12)
        alone = adapt(started, bad)  # the runs after the first start, with the spreads of a prior
        if num_good == 0 and spoil is SPOILED["all_stages"]:
            assert error_of(alone.model, TESTS) > 1.0, "they would decide everything"


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_disturbed_plans_count_less(model: LearnedCostModel, noise: float) -> None:
    slow = [
        dataclasses.replace(plan, noise=noise)
        for plan in on_other_hardware(measured_plans(12, 0, seed=14), 3.0)
    ]
    sound = PLANS[:6]
    adapted = adapt(model, [*slow, *sound])
    error = error_of(adapted.model, PLANS[20:])
    assert (error < 0.2) == (noise > 0)
    assert (adapted.error_before < 0.2) == (noise > 0), "errors are of plans that count"
