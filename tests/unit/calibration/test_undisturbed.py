"""Measurements beside which other processes had a core are repeated."""

from collections.abc import Sequence

import pytest
import torch

from dlrm_sharded.calibration import undisturbed
from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.undisturbed import MAX_TRIES, least_disturbed
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost

CPU = torch.device("cpu")


def measured(
    monkeypatch: pytest.MonkeyPatch,
    shares: Sequence[float],
    *,
    device: torch.device = CPU,
    has_cores: bool = True,
) -> tuple[list[int], int, Disturbance]:
    """The measurements made, the number of the one that counts, and what was beside it.

    Each takes a second, of which others have a core for a share.
    """
    now_s = waited_s = 0.0
    made: list[int] = []

    def measure() -> MeasuredCost:
        nonlocal now_s, waited_s
        now_s, waited_s = now_s + 1.0, waited_s + shares[len(made)]
        made.append(len(made))
        cost = PlanCost.from_stages({stage: [1.0] for stage in STAGES}, input_dist_ms=[0.0])
        return MeasuredCost(cost, {}, iterations=made[-1])

    monkeypatch.setattr(undisturbed.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(undisturbed, "core_wait_s", lambda: waited_s)
    monkeypatch.setattr(undisturbed, "max_over_ranks", lambda share, device, group: share)
    cost, beside = least_disturbed(measure, device, None, has_cores=has_cores)
    return made, cost.iterations, beside


@pytest.mark.parametrize("waits_before", range(MAX_TRIES))
def test_measures_until_nothing_disturbs(
    waits_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, chosen, beside = measured(monkeypatch, [0.5] * waits_before + [0.01])
    assert (len(made), chosen) == (waits_before + 1, waits_before)
    assert beside == Disturbance()


def test_takes_the_least_disturbed_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made, chosen, beside = measured(monkeypatch, [0.5, 0.35, 0.4])
    assert (len(made), chosen) == (MAX_TRIES, 1)
    assert beside.core_wait == pytest.approx(0.35)
    assert beside.noise > 0.3


@pytest.mark.parametrize(
    ("device", "has_cores"), [(CPU, False), (torch.device("cuda", 0), True)], ids=["shared", "gpu"]
)
def test_is_measured_once_where_waits_tell_nothing(
    device: torch.device, has_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, beside = measured(monkeypatch, [0.5] * 3, device=device, has_cores=has_cores)
    assert (len(made), beside) == (1, Disturbance())
