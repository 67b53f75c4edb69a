"""The times of a plan over the iterations of its measurement."""

import numpy as np
import pytest

from dlrm_sharded.measuring.measure import _change, _over_ranks
from dlrm_sharded.measuring.stage_clock import Iteration
from dlrm_sharded.plans.plan_cost import INPUT_DIST, STAGES

TIMED = (INPUT_DIST, *STAGES)


@pytest.mark.parametrize(
    ("exposed", "stages"), [([True, False, True], TIMED), ([True, False, False], ())]
)
def test_times_are_quartiles_over_iterations(exposed, stages, rank):
    """A stage counts as exposed if most of its iterations are."""
    iterations = [
        Iteration(
            dict.fromkeys(TIMED, time_ms),
            dict.fromkeys(TIMED, 0.1 * time_ms),
            dict.fromkeys(TIMED, is_exposed),
        )
        for time_ms, is_exposed in zip([1.0, 2.0, 4.0], exposed, strict=True)
    ]
    measured = _over_ranks(iterations, None)
    assert measured.iterations == 3
    assert measured.cost.critical_path_ms == len(STAGES) * 2.0
    assert measured.cost.input_dist_ms == (2.0,)
    assert measured.spread == dict.fromkeys(TIMED, (3.0 - 1.5) / 2.0)
    assert measured.launch_ms == pytest.approx(dict.fromkeys(TIMED, 0.2))
    assert measured.exposed == stages
    assert measured.change == pytest.approx(3.0), "from 1 to the median of 2 and 4"


def test_a_change_is_one_of_most_ranks():
    """A single iteration, or a single rank, does not show load from a time on."""
    steady = np.ones((3, 6))
    assert _change(steady) == 1.0
    once, one_rank = steady.copy(), steady.copy()
    once[:, 4] = 9.0
    one_rank[0, 3:] = 9.0
    assert _change(once) == _change(one_rank) == 1.0
    faster = steady.copy()
    faster[:, 3:] = 0.5
    assert _change(faster) == pytest.approx(2.0)
    assert _change(np.zeros((1, 3))) == 1.0
