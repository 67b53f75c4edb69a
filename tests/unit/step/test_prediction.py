"""Predicted steps: the sum of their parts, and an error that comes from those of the parts."""

import dataclasses
import math
from typing import Any

import pytest

from dlrm_sharded import DataError, PlanCost, StageCost
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.parts import PARTS, DenseTimes
from dlrm_sharded.step.prediction import COMPOSITION_ERROR, SHARING_ERROR, DensePart, predict_step
from dlrm_sharded.step.schedule import SERIAL
from tests.unit.step.made_up import dense_times

COST = PlanCost((StageCost(10, 4, 5, 20), StageCost(10, 4, 5, 20)), input_dist_ms=(1.0, 1.0))
DENSE = dense_times(optimizer_ms=2.0, gradient_bytes=4096)


def predicted(dense: DenseTimes = DENSE, **keys: Any):
    part = DensePart((dense, dense), all_reduce_ms=5.0)
    keys = {"cost_error": 0.1, **keys}
    return predict_step(COST, part, overlap=SERIAL, batch_size=130, **keys)


def test_even_ranks_take_the_sum_of_all_parts():
    step = predicted()
    assert step.step_ms == pytest.approx(65.0)
    assert step.samples_per_s == pytest.approx(2000.0)
    parts = step.breakdown.mean_parts_ms
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(65.0)
    assert parts["dense_forward"] == pytest.approx(6.0)
    assert parts["waiting"] == 0


def test_the_error_of_the_embeddings_counts_for_their_share_of_the_step():
    error = predicted().error
    assert error == pytest.approx((COMPOSITION_ERROR**2 + (0.1 * 39 / 65) ** 2) ** 0.5)
    slower = predicted(DENSE.scaled(100)).error
    assert COMPOSITION_ERROR < slower < error
    assert predicted(cost_error=None).error is None


def test_ranks_that_share_cores_have_an_error_of_their_own():
    # these two have a core each, so the step is the same and its error is not
    shared = predicted(sharing=CoreSharing(2, ranks_at_once=2.0))
    assert shared.step_ms == pytest.approx(predicted().step_ms)
    assert shared.error == pytest.approx(math.hypot(predicted().error, SHARING_ERROR))


def test_a_rank_with_slower_layers_makes_the_other_wait():
    dense = DensePart((DENSE, dataclasses.replace(DENSE, top_forward_ms=24.0)), 5.0)
    step = predict_step(COST, dense, overlap=SERIAL, batch_size=1)
    assert step.step_ms == pytest.approx(85.0)
    assert step.breakdown.waits[0].cause == 1
    assert step.breakdown.waits[0].waiting_ms == pytest.approx([20.0, 0.0])


def test_times_are_read_as_they_were_written():
    assert DenseTimes.from_json(DENSE.to_json()) == DENSE


@pytest.mark.parametrize(
    "value", [math.nan, -1.0, "3", True, 10**400], ids=lambda value: str(value)[:9]
)
def test_times_that_are_none_are_refused(value):
    with pytest.raises(DataError, match=r"at `\$.data_ms`"):
        DenseTimes.from_json(DENSE.to_json() | {"data_ms": value})
