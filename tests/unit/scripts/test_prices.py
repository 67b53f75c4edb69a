"""Reports on plans by prices of other hardware, measured or made up."""

import pytest

from benchmarks import elsewhere, made_up
from benchmarks.scaled_hardware import scaled, stage_factors
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan_cost import STAGES, StageCost


def test_plans_on_made_up_hardware_are_compared_with_what_each_names():
    costs = {"no runs": (4.0, 8.0), "1 good": (2.0, 6.0)}
    rows = [
        {"kind": "x", "number": i, "plans_by": name, "cost_ms": cost_ms, "stated": 0.3}
        | {"predicted_ms": 1.5 * cost_ms, "over": {"no runs": costs["no runs"][i], "true": 2.0}}
        for name, by_task in costs.items()
        for i, cost_ms in enumerate(by_task)
    ]
    line = made_up.report(rows, None).splitlines()[-1]
    cells = [cell.strip().partition(" [")[0] for cell in line.strip("|").split("|")]
    assert cells[:5] == ["x", "1 good", "1.50", "50.0%", "30%"]
    assert cells[5:8] == ["0.625", "0.750", "0 of 2"]
    assert cells[8:] == ["2.000", "3.000", "1 of 2"]


def test_prices_elsewhere_are_compared_with_torchrec_the_last_model_and_the_cheapest():
    times_ms = {"0 runs": (4.0, 6.0), "ten": (2.0, 12.0), "torchrec": (8.0, 8.0)}
    rows = [
        {"number": i, "sharder": name, "compute_ms": ms, "predicted_compute_ms": 2 * ms}
        | {"measured": {"per_rank": [_computation(ms), _computation(ms / 3)]}}
        | ({"predicted_by": {"0 runs": 4 * ms}} if name == "torchrec" else {"stated": None})
        for name, by_task in times_ms.items()
        for i, ms in enumerate(by_task)
    ]
    lines = [line.strip("| ").split("|") for line in elsewhere.report(rows, None).splitlines()]
    first, ten, last = ([cell.strip().partition(" [")[0] for cell in line] for line in lines[4:7])
    assert first[:6] == ["0 runs", "2.00", "100.0%", "-", "0.500", "1.50"]
    over_cheapest = ["1.500", "2.000", "1 of 2"]
    assert first[6:] == ["0.625", "0.750", "0 of 2", "1.250", "2.000", "1 of 2", *over_cheapest]
    assert ten[6:] == ["0.875", "1.500", "1 of 2", "1.000", "1.000", "0 of 2", *over_cheapest]
    assert last[:6] == ["torchrec", "-", "-", "-", "-", "1.50"]


def _computation(ms: float) -> dict[str, float]:
    return StageCost(ms / 4, 0.0, 0.0, 3 * ms / 4).to_json()


def test_a_scaled_machine_takes_so_many_times_as_long():
    factors = stage_factors("forward x 2, backward x 5.5")
    cost = scaled(StageCost(1.0, 2.0, 3.0, 4.0), factors)
    assert [cost.stage_ms(stage) for stage in STAGES] == [2.0, 2.0, 3.0, 22.0]


def test_only_directions_can_be_scaled():
    with pytest.raises(ConfigError, match="exchanges cannot be scaled; forward, backward can"):
        stage_factors("backward x 5.5, exchanges x 3")
