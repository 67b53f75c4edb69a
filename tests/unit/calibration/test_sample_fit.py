"""The fit of a prior to samples of hardware that it is not of: the synthetic one, but slower."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from dlrm_sharded.calibration.disturbance import Disturbance, reliability
from dlrm_sharded.calibration.prediction_errors import errors_table, prediction_errors
from dlrm_sharded.calibration.sample_fit import (
    LEAST_RANKS,
    SampleFit,
    critical_path_error,
    fit_samples,
    rank_error,
)
from dlrm_sharded.calibration.samples import RUN, Sample, workload_of_sample
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from tests.unit.calibration.cases import ELSEWHERE, on_other_hardware, sample
from tests.unit.cost.hardware import measured_plans

PLANS = on_other_hardware(measured_plans(30, 15, seed=3), ELSEWHERE)
TESTS = on_other_hardware(measured_plans(12, 0, seed=13), ELSEWHERE)


def error_of(model: LearnedCostModel, samples: Sequence[Sample] = TESTS) -> float:
    return float(np.mean([critical_path_error(cost_of(model, of), of) for of in samples]))


def cost_of(model: LearnedCostModel, of: Sample) -> PlanCost:
    return model.predict_workload(workload_of_sample(of), of.hosts)


@pytest.fixture(scope="module")
def whole(model: LearnedCostModel) -> SampleFit:
    return fit_samples(model, PLANS)


def test_the_stated_error_is_that_of_other_plans(model: LearnedCostModel, whole: SampleFit) -> None:
    assert error_of(model) > 1.0
    assert error_of(whole.model) < 0.15
    assert whole.error == pytest.approx(error_of(whole.model), abs=0.06)
    assert len(whole.left_out) == len(PLANS), "each plan is left out once"
    assert whole.outliers == ()


def test_one_plan_shows_how_fast_the_hardware_is(model: LearnedCostModel) -> None:
    found = fit_samples(model, PLANS[:1])
    assert error_of(found.model) < 0.5
    assert found.error == 0.3, "one plan does not show what others will be"
    twice = [PLANS[0], dataclasses.replace(PLANS[0], number=1000)]
    assert 0.05 < fit_samples(model, twice).error < 0.3, "two may agree by chance"


@pytest.mark.parametrize(
    ("kind", "slower", "core_wait", "least"),
    [
        (RUN, (1.0, 1.0, 5.0), 0.0, 3.5),  # the last one contradicts the others, and is left out
        (RUN, (1.0, 24.0), 0.0, 3.9),  # the costs are in between
        (RUN, (10.0, 10.0), 0.9, 8.9),  # they agree, under load
        ("computation", (1.0, 20.0) * 4, 0.5, 3.0),
    ],
)
def test_the_stated_error_is_what_was_seen(
    model: LearnedCostModel, kind: str, slower: Sequence[float], core_wait: float, least: float
) -> None:
    noise = Disturbance(core_wait).noise
    seen = [
        dataclasses.replace(on_other_hardware([plan], factor)[0], kind=kind, noise=noise)
        for plan, factor in zip(PLANS, slower, strict=False)
    ]
    if kind == RUN:
        seen = [dataclasses.replace(run, number=0) for run in seen]  # as runs are written
    assert fit_samples(model, seen).error > least
    if kind == RUN:
        assert fit_samples(model, [*seen, *PLANS[10:15]]).error < 1.0, "measured since then"


def edited(factors: Mapping[str, float], *, rank: int | None = None) -> Callable[[Sample], Sample]:
    """Multiply stages of a sample, on one rank or on all, the other times being kept."""

    def edit(of: Sample) -> Sample:
        [all_ranks] = on_other_hardware([of], dict.fromkeys(ELSEWHERE, 1.0) | dict(factors))
        if rank is None:
            return all_ranks
        per_rank = list(of.cost.per_rank)
        per_rank[rank] = all_ranks.cost.per_rank[rank]
        cost = PlanCost(tuple(per_rank), of.cost.input_dist_ms)
        return dataclasses.replace(of, cost=cost)

    return edit


WRONG = {
    "all_slow": edited(dict.fromkeys(ELSEWHERE, 1000.0)),
    "all_fast": edited(dict.fromkeys(ELSEWHERE, 1e-3)),
    "suspended_for_a_while": edited(dict.fromkeys(ELSEWHERE, 30.0)),
    "slow_stage": edited({"fwd_comm": 1e3}),
    "five_times": edited({"bwd_compute": 5.0}),
    "fast_stage_of_a_rank": edited({"bwd_compute": 1e-3}, rank=1),
    "no_time": edited({"bwd_comm": 0.0}),
    "slow_ids": edited({"input_dist": 1e4}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("place", [0, 20])
def test_one_wrong_sample_changes_no_cost(
    model: LearnedCostModel, whole: SampleFit, wrong: Callable, place: int
) -> None:
    """It is left out, or counts so little that the cost of no plan changes by 1 %."""
    added = dataclasses.replace(wrong(PLANS[30]), number=1000)
    found = fit_samples(model, [*PLANS[:place], added, *PLANS[place:]])
    if wrong is not WRONG["five_times"]:
        assert [outlier.index for outlier in found.outliers] == [place]
    for of in TESTS:
        expected = cost_of(whole.model, of)
        assert cost_of(found.model, of).cost_ms == pytest.approx(expected.cost_ms, rel=0.01)


def test_a_disturbed_sample_changes_no_cost(model: LearnedCostModel, whole: SampleFit) -> None:
    """A rank that lacked its core for half of the time, which the sample says."""
    slow = dataclasses.replace(
        edited(dict.fromkeys(ELSEWHERE, 2.0))(PLANS[0]),
        number=1000,
        noise=Disturbance(core_wait=0.5).noise,
    )
    found = fit_samples(model, [*PLANS, slow])
    for of in TESTS:
        expected = cost_of(whole.model, of).cost_ms
        assert cost_of(found.model, of).cost_ms == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("num_slow", "num_left_out"), [(2, [2]), (6, [0, 1])])
def test_samples_that_agree_are_a_change_of_the_hardware(
    model: LearnedCostModel, num_slow: int, num_left_out: list[int]
) -> None:
    """After which all stages take 20 times as long."""
    slow = on_other_hardware(PLANS[10 : 10 + num_slow], 20.0)
    assert len(fit_samples(model, [*PLANS[:10], *slow]).outliers) in num_left_out


def test_other_work_adds_noise() -> None:
    assert Disturbance().noise == 0.0
    assert reliability(0.0) == 1.0
    half = Disturbance(core_wait=0.5)
    assert half.noise == pytest.approx(math.log(2))
    assert reliability(half.noise) < 0.03
    assert Disturbance(change=2.0).noise == pytest.approx(half.noise)
    assert Disturbance(core_wait=1.5, change=0.5).noise < 4.0, "whatever stands in a line"
    assert Disturbance(0.5, 2.0).noise == pytest.approx(math.sqrt(2) * math.log(2))


def pairs(num_plans: int, *, num_ranks: int = 4, error: float = 0.1) -> list:
    """Plans whose ranks are off by an error of their own, and by a factor of the plan."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(num_plans):
        predicted_ms = rng.uniform(36.0, 50.0, num_ranks)
        common = rng.lognormal(0.0, 0.5)
        measured_ms = predicted_ms * common * rng.lognormal(0.0, error, num_ranks)
        found.append((computing(predicted_ms), measured(measured_ms)))
    return found


def computing(computation_ms: np.ndarray) -> PlanCost:
    return PlanCost(tuple(StageCost(ms / 4, 1.0, 2.0, 3 * ms / 4) for ms in computation_ms))


def measured(computation_ms: np.ndarray) -> Sample:
    return dataclasses.replace(sample(), cost=computing(computation_ms))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_error_of_ranks_is_found_without_what_they_have_in_common(num_ranks: int) -> None:
    assert rank_error(pairs(400, num_ranks=num_ranks)) == pytest.approx(0.1, rel=0.15)
    some = pairs(40)
    odd = [(computing(np.full(4, 10.0)), measured(np.array([10.0, 10.0, 10.0, 1000.0])))]
    assert rank_error([*some, *odd]) == pytest.approx(rank_error(some), rel=0.1)
    assert rank_error(pairs(LEAST_RANKS // 4 - 1)) is None
    idle = [(computing(np.array([5.0, 0.0])), measured(np.array([5.0, 0.0])))] * LEAST_RANKS
    assert rank_error(idle) is None


def test_compares_ranks_and_slowest_ranks() -> None:
    measured = sample(times_ms=((2, 1, 2, 3, 4), (2, 2, 1, 1, 6)))
    predicted = PlanCost((StageCost(2, 2, 3, 4), StageCost(1, 4, 1, 6)), input_dist_ms=(3.0, 3.0))
    errors = prediction_errors([(predicted, measured)])
    assert {name: (row["num"], row["mape"]) for name, row in errors.items()} == {
        "plan, critical path": (1, 15.38),  # 15 of 13
        "plan, embedding cost": (1, 20.0),  # 12 of 10
        "forward computation": (2, 75.0),  # 2 of 1, 1 of 2
        "backward computation": (2, 0.0),
        "forward communication, 2 ranks": (1, 100.0),  # 4 of 2
        "backward communication, 2 ranks": (1, 0.0),
        "input distribution, 2 ranks": (1, 50.0),
    }
    assert "| forward computation | 2 | 75.0 | 75.0 |" in errors_table(errors)
    tiny = sample(kind="communication", times_ms=((2, 1, 2, 3, 4), (2, 2, 1, 1, 6)))
    assert not [name for name in prediction_errors([(predicted, tiny)]) if "comp" in name]
