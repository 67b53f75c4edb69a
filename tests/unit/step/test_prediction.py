"""Predicted steps: the sum of their parts, and an error that comes from those of the parts."""

import dataclasses
import math
from typing import Any

import pytest

from dlrm_sharded import DataError, PlanCost, StageCost
from dlrm_sharded.explain.step_text import needs_text, step_text
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.host_time import HOST_ERROR, LOOP_MS, MEASURED_ERROR, HostTime
from dlrm_sharded.step.parts import HOST_WAIT, PARTS, DenseTimes
from dlrm_sharded.step.prediction import (
    COMPOSITION_ERROR,
    SHARING_ERROR,
    DensePart,
    StepCorrection,
    predict_step,
)
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


MEASURED = frozenset({"dense", "lookups"})


def host_of(ms: float, measured: frozenset[str] = MEASURED) -> HostTime:
    """A host that needs so long for a step, in two halves beside the loop."""
    return HostTime((ms - LOOP_MS) / 2, (ms - LOOP_MS) / 2, measured)


@pytest.mark.parametrize(
    ("host_ms", "step_ms", "bound"),
    [(40.0, 65.0, "GPUs"), (65.0, 65.0, "GPUs"), (80.0, 80.0, "host")],
)
def test_a_step_is_what_the_slower_of_devices_and_host_needs(host_ms, step_ms, bound):
    step = predicted(host=host_of(host_ms))
    assert (step.step_ms, step.device_ms) == (pytest.approx(step_ms), pytest.approx(65.0))
    assert step.host_ms == pytest.approx(host_ms)
    assert step.breakdown.mean_parts_ms == predicted().breakdown.mean_parts_ms | {
        HOST_WAIT: pytest.approx(step_ms - 65.0)
    }
    assert (step.bounding_host is not None) == (bound == "host")
    said = f"bound by the {bound}: the GPUs need 65.0 ms for a step, the host {host_ms:.1f} ms"
    assert (needs_text(step) or "").startswith(said)
    assert step_text(step).endswith(f"; {needs_text(step)}")


def test_a_cpu_is_its_own_host():
    step = predicted()
    assert (step.host_ms, step.bounding_host, step.device_ms) == (None, None, step.step_ms)
    assert needs_text(step) is None
    assert "need" not in step_text(step)


def test_earlier_runs_correct_both_needs():
    correction = StepCorrection(1.5, error=0.02, num_runs=3)
    step = predicted(host=host_of(80.0), correction=correction)
    figures = (step.step_ms, step.device_ms, step.host_ms)
    assert figures == pytest.approx((1.5 * 80, 1.5 * 65, 1.5 * 80))


def test_the_error_of_a_step_that_the_host_bounds_is_the_hosts():
    """However wrong the prices of lookups are, and what was measured of the host is surer."""
    for cost_error in (0.1, 0.5):
        step = predicted(host=host_of(80.0), cost_error=cost_error)
        assert step.host is not None
        assert step.error == pytest.approx(math.hypot(step.host.error, COMPOSITION_ERROR))
    assert predicted(host=host_of(40.0)).error == predicted().error
    prior, partly, measured = (
        host_of(80.0, frozenset(names)) for names in ((), ("dense",), MEASURED)
    )
    assert prior.error == pytest.approx(HOST_ERROR)
    assert MEASURED_ERROR < measured.error < partly.error < HOST_ERROR
    assert [host.source for host in (prior, partly, measured)] == [
        *("a prior", "measured in part", "measured")
    ]


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
