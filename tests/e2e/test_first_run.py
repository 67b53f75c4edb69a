"""A first run on hardware measures it; others do not."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import environment, result_of, script, train

pytestmark = pytest.mark.slow

ANNOUNCED = "nothing was measured on this hardware yet"
MEASURED = "measured"
START = [*SMALL_RUN, "calibrate=14", "data._target_=tests.e2e.planted.StartUnderLoad"]


@pytest.fixture(autouse=True)
def _new_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has a cost model of a machine with this switch, and nobody ran here before."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    monkeypatch.setenv("DLRM_SHARDED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DLRM_SHARDED_JOURNAL", "auto")


def kind_of_costs(folder: Path) -> str:
    return str(json.loads((folder / "plan.json").read_text())["prices"]["kind"])


def test_the_first_run_measures_and_the_second_does_not(tmp_path: Path) -> None:
    planned = [*START, "+data.other_work=null", "dry_run=true"]
    not_searching = train(tmp_path / "random", *planned, "sharder=random")
    assert ANNOUNCED not in not_searching.stderr
    never = train(tmp_path / "never", *planned, "calibrate=never")
    assert ANNOUNCED not in never.stderr
    assert [kind_of_costs(tmp_path / run) for run in ("random", "never")] == ["prior", "prior"]
    first = train(tmp_path / "first", *START, "+data.other_work=null")
    assert first.stderr.count(ANNOUNCED) == 1
    assert "once, for 14 s" in first.stderr
    assert "plans in" in first.stderr
    assert MEASURED in result_of(tmp_path / "first")["prices"]
    [journal] = (tmp_path / "cache").rglob("*.jsonl")
    *_, run = map(json.loads, journal.read_text().splitlines())
    assert (run["run"]["kind"], run["fbgemm"]) == ("run", version("fbgemm-gpu-cpu"))
    second = train(tmp_path / "second", *planned)
    assert ANNOUNCED not in second.stderr
    assert "is a prior" not in second.stderr
    assert kind_of_costs(tmp_path / "second") == "measured"
    num_runs = json.loads((tmp_path / "second" / "plan.json").read_text())["prices"]["num_runs"]
    # under load, a run may take several times as long as the plans before it
    assert num_runs == 1 or "left out, because the others contradict" in second.stderr


def test_a_sweep_measures_once_though_other_work_disturbs(tmp_path: Path) -> None:
    """Its jobs share the cost model, which is not kept; so the next run measures again.

    The first job's sharder uses no costs, but its plan is predicted as the others' plans are.
    """
    sweep, disturbed = tmp_path / "sweep", [*START, "+data.other_work=a busy machine"]
    command = ["-m", "dlrm_sharded.train", "-m", f"hydra.sweep.dir={sweep}", "sharder=dim,search"]
    preloaded.run(*command, *disturbed, "dry_run=true", env=environment(), exit_code=0)
    logs = [path.read_text() for path in sorted(sweep.glob("*/train.log"))]
    assert len(logs) == 2
    assert "".join(logs).count(ANNOUNCED) == 1
    assert "".join(logs).count("the measurement was disturbed: a busy machine") == 1
    plans = [json.loads(path.read_text()) for path in sweep.glob("*/plan.json")]
    assert {plan["prices"]["kind"] for plan in plans} == {"measured"}
    assert len({plan["made_from"]["prices_digest"] for plan in plans}) == 1
    again = train(tmp_path / "again", *disturbed, "dry_run=true")
    assert ANNOUNCED in again.stderr


def test_a_plan_for_this_machine_measures_lookups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For unknown ranks it does not."""
    monkeypatch.setenv("DLRM_SHARDED_CALIBRATE", "14")
    planned = [
        *("data=synthetic", "data._target_=tests.e2e.planted.StartUnderLoad"),
        "+data.other_work=null",
        *("data.max_rows=500", "batch_size=256", "topology.world_size=2"),
        *("topology.memory_gib=1", "topology.compute_device=cpu"),
    ]
    elsewhere = script("plan", tmp_path, *planned, "out=a.json")
    assert ANNOUNCED not in elsewhere.stderr
    here = script("plan", tmp_path, *planned, "hardware=here", "out=b.json")
    assert here.stderr.count(ANNOUNCED) == 1
    assert "exchange (" not in here.stderr
    costs = json.loads((tmp_path / "b.json").read_text())["prices"]
    assert (costs["kind"], costs["error"]) == ("measured", None)
    assert "exchanges were not measured" in costs["reasons"]
