"""dlrm-simulate: a cluster on this machine, or one message and an exit code."""

import csv
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.simulation.store import MEASUREMENTS, SETTINGS
from tests.e2e.runs import keep_probe, script

QUICK = ("measure.iterations=3", "measure.time_budget_s=0.1", "sharders=[dim]")
DATA = ("data=synthetic", "data.num_train_batches=2", "topology.world_size=4", "batch_size=256")
H100 = ("hardware=h100_sxm", "topology=h100_80gb", "topology.ranks_per_host=2")
TASK = ShardingTask(
    (Table("a", 4000, 16, 3.0), Table("b", 900, 8, 1.5, pooled=False), Table("c", 50, 32, 1.0)),
    Topology(3, memory_bytes=10**6, compute_device="cpu"),
    48,
)


simulate = functools.partial(script, "simulate")


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "simulation.json").read_text())


@pytest.fixture
def task_json(tmp_path: Path) -> Path:
    write_json(tmp_path / "task.json", TASK.to_json())
    return tmp_path / "task.json"


def test_measures_every_rank_and_goes_on(task_json):
    keep_probe()
    folder = task_json.parent
    arguments = ["task=task.json", "out=out", *QUICK[:2], "sharder=[random,dim]"]
    done = simulate(folder, *arguments)
    assert "simulated, lookups measured on cpu" in done.stderr
    assert "3 of 3 tables have none" in done.stderr
    found = results(folder / "out")
    settings = json.loads((folder / "out" / SETTINGS).read_text())
    assert settings["optimizer"]["embedding"] == "sgd"  # as the file counts
    assert [run["sharder"] for run in found["sharders"]] == ["random", "dim"]
    for run in found["sharders"]:
        assert run["step_ms"] == pytest.approx(sum(run["parts_ms"].values()))
        assert sum(run["ranks"].values()) == 3
    with (folder / "out" / "ranks.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6

    # as if it had been killed while it wrote the last measurement
    path = folder / "out" / MEASUREMENTS
    before = path.read_bytes()
    path.write_bytes(before[:-20])
    (folder / "out" / "dim" / "plan.json").write_text("{")
    done = simulate(folder, *arguments)
    assert "cannot be used and is passed over: line " in done.stderr
    assert "plan.json" in done.stderr
    after = path.read_bytes()
    kept = before[: before.rstrip().rfind(b"\n") + 1]
    assert after.startswith(kept)
    # another measurement of the same rank may leave others slowest, which are measured again
    assert after.count(b"\n") >= before.count(b"\n")

    # nothing is left to measure
    text = (folder / "out" / "simulation.json").read_bytes()
    done = simulate(folder, *arguments)
    assert path.read_bytes() == after
    assert (folder / "out" / "simulation.json").read_bytes() == text


def test_folds_tables_that_do_not_fit(task_json):
    done = simulate(
        task_json.parent, "task=task.json", "out=out", "table_gib=0.0002", "spread=0", *QUICK
    )
    [run] = results(task_json.parent / "out")["sharders"]
    assert run["num_folded_ranks"] == 1
    assert "tables had fewer rows than in the plan" in done.stderr


def test_priced_simulations_are_equal_files(tmp_path):
    sharders = "sharder=random,size"
    for name in ("a", "b"):
        done = simulate(tmp_path, *DATA, *H100, sharders, f"out={name}")
        said = "predicted by the prior of NVIDIA H100 80GB HBM3, nothing was measured"
        assert said in done.stderr
    for file in ("simulation.json", "ranks.csv", "random/timeline.png", "size/trace.json.gz"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert not (tmp_path / "a" / MEASUREMENTS).exists()
    assert [run["ranks"] for run in results(tmp_path / "a")["sharders"]] == [{"priced": 4}] * 2


def test_a_sharder_that_fails_is_a_row(task_json):
    topology = dataclasses.replace(TASK.topology, memory_bytes=150_000)
    write_json(task_json, dataclasses.replace(TASK, topology=topology).to_json())
    arguments = ("task=task.json", "spread=0", *QUICK[:2])
    sharders = "sharder=random,neuroshard;time_budget_s=1"
    done = simulate(task_json.parent, *arguments, sharders, "out=out")
    found = results(task_json.parent / "out")
    assert [entry["sharder"] for entry in found["failed"]] == ["random"]
    assert [run["sharder"] for run in found["sharders"]] == ["neuroshard;time_budget_s=1"]
    done = simulate(task_json.parent, *arguments, "sharder=random", "out=none", exit_code=2)
    assert "no sharder found a plan" in done.stderr
    assert not (task_json.parent / "none" / "simulation.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=task.json", "sharder=foo", "out=out"], "foo"),
        (["task=task.json", "sharder=dim;foo=1", "out=out"], "foo"),
        (["task=task.json", "sharder=dim;foo", "out=out"], "key=value"),
        (["task=task.json"], "out is not set"),
        (["out=out"], "task=task.json or data="),
        (["task=none.json", "out=out"], "none.json"),
        (["task=task.json", "out=task.json"], "out is 'task.json'"),
        (["task=task.json", "out=."], "other files"),
        (["task=task.json", "hardware=h100_sxm", "out=out"], "the task is for CPUs"),
        (["task=task.json", "hardware=abacus", "out=out"], "abacus"),
        (["task=task.json", "overlap=some", "out=out"], "overlap is 'some'"),
        (["task=task.json", "measured_ranks=few", "out=out"], "measured_ranks"),
        (["task=task.json", "minutes=0", "out=out"], "minutes"),
        (["task=task.json", "sharder=dim", "cost_model=none", "out=out"], "cost_model is none"),
        ([*DATA, "topology.world_size=3", "out=out"], "multiple of the 3 ranks"),
        ([*DATA, "topology.world_size=x", "out=out"], "topology.world_size is 'x'"),
        ([*DATA, "topology.world_size=null", "out=out"], "topology.world_size is None"),
        ([*DATA, "topology.ranks_per_host=x", "out=out"], "topology.ranks_per_host is 'x'"),
        ([*DATA, "topology.ranks_per_host=3", "out=out"], "topology.ranks_per_host is 3"),
        ([*DATA, "hardware=h100_sxm", "out=out"], "topology.memory_gib is not set"),
        (
            [*DATA, "hardware=h100_sxm", "topology.memory_gib=500", "out=out"],
            "h100_sxm has 80 GiB; state at most that",
        ),
        ([*DATA, "topology.compute_device=cuda", "out=out"], "topology.compute_device"),
        (["data=criteo_kaggle", "out=out"], "data/criteo_kaggle"),
        (["-m", *DATA, "out=out"], "leave -m out"),
        ([*DATA, "sharder.seed=1", "out=out"], "which sharder"),
        ([*DATA, "sharders=[dim]", "sharder=random", "out=out"], "sharder is there 2 times"),
    ],
)
def test_one_message_and_exit_code_2(task_json, overrides, message):
    before = sorted(path.name for path in task_json.parent.iterdir())
    done = simulate(task_json.parent, *overrides, exit_code=2)
    assert message in done.stderr
    after = sorted(path.name for path in task_json.parent.iterdir())
    assert [name for name in after if name != "data"] == before  # Criteo's data has a lock there
