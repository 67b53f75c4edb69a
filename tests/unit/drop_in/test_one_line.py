"""`ShardedPlanner` by the name of a sharder: a shell of the planner that runs use."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.sharding_plan import get_default_sharders

from dlrm_sharded import ShardedPlanner, Topology, plan_model, read_plan, read_task, validate
from dlrm_sharded.files.errors import ConfigError, InvalidPlanError
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.unit.drop_in.made_up import MODEL, TOPOLOGY, bags

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NAMED: dict[str, Any] = {"topology": TOPOLOGY, "patience": 1, "cost_model": MODEL}


def test_a_name_makes_the_planner_of_runs(tmp_path: Path) -> None:
    """With the cost, its bound and a diagnosis, in the files that a run writes."""
    plan, report = plan_model(bags(), batch_size=1024, output_dir=tmp_path, **NAMED)
    assert len(plan.plan[""]) == 6
    assert report.details.sharder == "search"
    assert report.task.batch_size == 1024 * 4
    assert report.cost_ms is not None
    assert report.bound_ms is not None
    assert 0 < report.bound_ms <= report.cost_ms <= (report.critical_path_ms or 0)
    assert report.details.diagnosis is not None
    assert report.files == (tmp_path / "plan.json", tmp_path / "task.json")
    assert str(tmp_path / "plan.json") in str(report)
    validate(read_plan(report.files[0]), read_task(report.files[1]))
    made_from = json.loads(report.files[0].read_text())["made_from"]
    assert made_from["sharder"]["patience"] == 1


def test_a_plan_that_was_made_before_is_taken(tmp_path: Path) -> None:
    made, report = plan_model(bags(), "size", topology=TOPOLOGY, output_dir=tmp_path)
    again, taken = plan_model(bags(), topology=TOPOLOGY, plan=tmp_path / "plan.json")
    assert taken.details.sharder == "plan_file"
    assert taken.plan == report.plan
    assert {name: p.ranks for name, p in again.plan[""].items()} == {
        name: p.ranks for name, p in made.plan[""].items()
    }
    with pytest.raises(InvalidPlanError):
        plan_model(bags(), topology=Topology(2, 10**9), plan=tmp_path / "plan.json")


def test_prices_are_those_that_a_run_finds() -> None:
    """The task is of this hardware and its fused optimizer, whose state is memory."""
    model = bags()
    fuse("rowwise_adagrad", model.parameters(), 0.1)
    planner = ShardedPlanner(GreedySharder("size"), topology=TOPOLOGY)
    planner.plan(model, get_default_sharders())
    assert planner.report is not None
    assert planner.report.details.standing is not None
    assert planner.report.error is not None
    # Both depend on the machine: the prices of the package are of one that others are like.
    assert re.search(r"\((prior|calibrated), within ", str(planner.report))
    assert planner.report.task.topology.optimizer_bytes_per_row == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 1, "global_batch_size": 4}, "both given"),
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"cost_model": "learned"}, "cost_model is 'learned'"),
        ({"patence": 1, "cost_model": None}, "no option 'patence'"),
        ({"sharder": GreedySharder("size"), "patience": 1}, "no argument 'patience'"),
    ],
)
def test_an_argument_that_is_wrong(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_model(bags(), topology=TOPOLOGY, **options)
