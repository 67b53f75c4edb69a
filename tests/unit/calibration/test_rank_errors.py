"""The errors of single ranks are found beside the error that they have in common."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.calibration.rank_errors import LEAST_RANKS, rank_error
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from tests.unit.calibration.cases import sample

ERROR = 0.1


def pairs(num_plans: int, *, num_ranks: int = 4, error: float = ERROR) -> list:
    """Plans whose ranks are off by an error of their own, and by a factor of the plan."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(num_plans):
        predicted_ms = rng.uniform(36.0, 50.0, num_ranks)
        common = rng.lognormal(0.0, 0.5)
        measured_ms = predicted_ms * common * rng.lognormal(0.0, error, num_ranks)
        found.append((cost(predicted_ms), measured(measured_ms)))
    return found


def cost(computation_ms: np.ndarray) -> PlanCost:
    return PlanCost(tuple(StageCost(ms / 4, 1.0, 2.0, 3 * ms / 4) for ms in computation_ms))


def measured(computation_ms: np.ndarray) -> Sample:
    return dataclasses.replace(sample(), cost=cost(computation_ms))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_error_is_found_beside_what_ranks_have_in_common(num_ranks):
    assert rank_error(pairs(400, num_ranks=num_ranks)) == pytest.approx(ERROR, rel=0.15)
    assert rank_error(pairs(20, error=0.0)) == pytest.approx(0.0, abs=1e-9)


def test_few_disturbed_ranks_do_not_decide():
    some = pairs(40)
    disturbed = [(cost(np.full(4, 10.0)), measured(np.array([10.0, 10.0, 10.0, 1000.0])))]
    assert rank_error([*some, *disturbed]) == pytest.approx(rank_error(some), rel=0.1)


def test_too_few_ranks_and_those_without_work_say_nothing():
    assert rank_error(pairs(LEAST_RANKS // 4 - 1)) is None
    idle = [(cost(np.array([5.0, 0.0])), measured(np.array([5.0, 0.0])))] * LEAST_RANKS
    assert rank_error(idle) is None
