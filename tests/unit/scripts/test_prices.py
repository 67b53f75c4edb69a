"""Reports on plans by prices of other hardware, measured or made up."""

from argparse import Namespace

import pytest

from benchmarks import elsewhere, made_up
from benchmarks.scaled_hardware import scaled, stage_factors
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan_cost import STAGES, StageCost
from dlrm_sharded.sharders.heuristics import GreedySharder


def test_plans_on_made_up_hardware_are_compared_with_what_each_names():
    costs = {"no runs": (4.0, 8.0), "1 good": (2.0, 6.0)}
    off = (3.0, 0.75)  # means are geometric, and errors absolute
    rows = [
        {"kind": "x", "number": i, "plans_by": name, "cost_ms": cost_ms, "stated": 0.3}
        | {"predicted_ms": off[i] * cost_ms, "over": {"no runs": costs["no runs"][i], "true": 2.0}}
        for name, by_task in costs.items()
        for i, cost_ms in enumerate(by_task)
    ]
    line = made_up.report(rows, None).splitlines()[-1]
    cells = [cell.strip().partition(" [")[0] for cell in line.strip("|").split("|")]
    assert cells[:5] == ["x", "1 good", "1.50", "112.5%", "30%"]
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


def test_plans_by_any_prices_are_judged_by_the_true_ones(monkeypatch):
    """A row has the cost of its own plan, the prediction of its own prices and costs of others."""
    whole = {name: GreedySharder(name) for name in ("dim", "size")}
    told = []

    def compared(packaged, true, options):
        told.append(true)
        over = {"the other": "size"}
        return {
            "packaged": made_up.Contender(whole["dim"], packaged, over),
            "size": made_up.Contender(whole["size"]),
        }

    monkeypatch.setitem(made_up.COMPARISONS, "prices", compared)
    monkeypatch.setattr(made_up, "quiet", lambda: None)
    options = Namespace(
        kinds=["backward x 5"], gpu=None, compare="prices", tasks=2, seed=3, world_size=2
    )
    [case] = made_up.cases(options)
    rows = case.run()
    tasks, [true] = made_up._tasks(options), told
    assert {task.topology.world_size for task in tasks} == {2}
    assert [(row["number"], row["plans_by"]) for row in rows] == [
        (number, name) for number in range(2) for name in ("packaged", "size")
    ]
    for row in rows:
        task = tasks[row["number"]]
        costs = {name: true.predict(of.shard(task), task).cost_ms for name, of in whole.items()}
        assert row["cost_ms"] == costs["dim" if row["plans_by"] == "packaged" else "size"]
        assert row["over"] == ({"the other": costs["size"]} if "predicted_ms" in row else {})
    packaged = made_up._packaged()
    predicted = packaged.predict(whole["dim"].shard(tasks[0]), tasks[0]).cost_ms
    assert rows[0]["predicted_ms"] == predicted < rows[0]["cost_ms"] / 1.5
    assert rows[0]["stated"] == made_up.PRIOR_ERROR
    assert "stated" not in rows[1]
