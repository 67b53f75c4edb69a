"""dlrm-plan: a plan, or one message and an exit code."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.hardware.match import UNNAMED
from dlrm_sharded.plans.plan import read_plan
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.testing import small_tasks
from tests.e2e.runs import script
from tests.e2e.test_refusals import DATA

plan = functools.partial(script, "plan")


def written_plan(task_json: Path) -> dict[str, Any]:
    return json.loads(task_json.with_name("p.json").read_text())


@pytest.mark.parametrize("sharder", ["size_lookup", "torchrec"])
def test_writes_a_plan(task_json, sharder):
    done = plan(task_json.parent, "task=task.json", f"sharder={sharder}", "out=p.json")
    validate(read_plan(task_json.parent / "p.json"), read_task(task_json))
    written = written_plan(task_json)
    assert written["predicted"]["max_ms"] >= written["lower_bound_ms"] > 0
    cost_ms, gap = written["predicted"]["max_ms"], written["gap"]
    assert f"predicted {cost_ms:.2f} ms (prior), at most {100 * gap:.1f} %" in done.output
    assert "Ranks that bound the cost" not in done.output
    files = sorted(p.name for p in task_json.parent.iterdir())
    assert files == ["p.json", "p.prices.safetensors", "task.json"]
    again = plan(task_json.parent, "task=task.json", "again=p.json", "out=q.json")
    assert "the plan, its predicted cost and its bound equal those of p.json" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("source", [("task=task.json",), DATA], ids=["task", "data"])
def test_a_plan_on_standard_output_is_json(task_json, source):
    done = plan(task_json.parent, *source, "sharder=dim", "out=-")
    assert json.loads(done.stdout)["sharder"] == "dim"
    assert "shards of" in done.stderr
    assert ("task.json is not written" in done.stderr) == (source == DATA)
    assert [*task_json.parent.iterdir()] == [task_json]


@pytest.mark.slow
def test_a_plan_made_again_says_what_differs(task_json):
    plan(task_json.parent, "task=task.json", "sharder=random", "seed=3", "out=p.json")
    fields = written_plan(task_json)
    fields["made_from"]["sharder"]["seed"] = 4
    fields["made_from"]["commit"] = "abc"
    write_json(task_json.parent / "p.json", fields)
    again = plan(task_json.parent, "task=task.json", "again=p.json", "out=q.json")
    assert "the plan differs from that of p.json: commit: 'abc', now" in again.output
    fields["made_from"]["prices_digest"] = None
    write_json(task_json.parent / "p.json", fields)
    words = ["task=task.json", "again=p.json", "out=q.json"]
    again = plan(task_json.parent, *words, exit_code=2)
    assert "p.json does not have its cost model" in again.stderr
    again = plan(task_json.parent, *words, "cost_model=none")
    assert "prices_digest" not in again.output
    write_json(task_json.parent / "p.json", {**fields, "made_from": None})
    again = plan(task_json.parent, *words, exit_code=2)
    assert "p.json lacks made_from" in again.stderr


@pytest.mark.slow
def test_each_plan_of_a_sweep_has_its_files(task_json):
    plan(task_json.parent, "-m", "sharder=dim,size", "task=task.json", "out=p.json")
    made = [json.loads((task_json.parent / f"p_{num}.json").read_text()) for num in (0, 1)]
    assert [one["sharder"] for one in made] == ["dim", "size"]
    assert not (task_json.parent / "p.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sharder", ["dim", "search"])
def test_explains_a_plan(task_json, sharder):
    overrides = ["task=task.json", f"sharder={sharder}", "explain=true", "out=p.json"]
    done = plan(task_json.parent, *overrides)
    shown = done.output
    titles = ("Ranks that bound the cost", "Gains of splits", "Gains of alternatives")
    places = [shown.index(title) for title in titles]
    assert places == sorted(places)
    assert "one more rank: " in shown[places[-1] :]
    cost_ms = written_plan(task_json)["predicted"]["max_ms"]
    assert f"slowest rank's {cost_ms:.2f} ms" in shown


@pytest.mark.slow
def test_the_last_lines_say_whose_costs_a_plan_has(task_json):
    """A task.json without a compute device is for GPUs, and those are not known."""
    task = small_tasks()["w3-mixed"].to_json()
    del task["topology"]["compute_device"]
    write_json(task_json, task)
    done = plan(task_json.parent, "task=task.json", "sharder=search", "out=p.json")
    costs = (done.output).split("cost model: ")[-1]
    for said in ("prior, within about 100 %", "no GPU is named", "h100_sxm", "device to cpu"):
        assert said in costs
    assert costs.count("\n") <= 1, "nothing comes after it"
    assert done.output.count("no GPU is named") == 1
    written = written_plan(task_json)
    assert written["lower_bound_ms"] > 0
    assert written["caveat"] is None


@pytest.mark.slow
def test_plans_for_a_named_gpu(task_json):
    task = small_tasks()["w3-mixed"].to_json()
    overrides = ["task=task.json", "sharder=dim", "out=p.json"]
    done = plan(task_json.parent, *overrides, "hardware=l40s", exit_code=2)
    assert "hardware is 'l40s', a GPU, and the task is for CPUs" in done.output
    task["topology"]["compute_device"] = "cuda"
    write_json(task_json, task)
    done = plan(task_json.parent, *overrides, "hardware=l40s")
    costs = written_plan(task_json)["prices"]
    assert (costs["kind"], costs["hardware"]) == ("prior", "NVIDIA L40S")
    task["topology"]["memory_bytes"] = 49 * 2**30
    write_json(task_json, task)
    done = plan(task_json.parent, *overrides, "hardware=l40s", exit_code=2)
    assert "49 GiB of a rank are stated" in done.output
    done = plan(task_json.parent, *overrides, "hardware=l41s", exit_code=2)
    assert "hardware is 'l41s'; known are v100, a100, " in done.output


@pytest.mark.slow
def test_plans_for_this_machine(task_json):
    """Whose fingerprint chooses the costs, and whose earlier runs correct them."""
    task = small_tasks()["w3-mixed"].to_json()
    overrides = ["task=task.json", "sharder=dim", "hardware=here", "out=p.json"]
    done = plan(task_json.parent, *overrides)
    costs = written_plan(task_json)["prices"]
    assert costs["hardware"].startswith("cpu")
    assert UNNAMED not in costs["reasons"]
    task["topology"]["compute_device"] = "cuda"
    write_json(task_json, task)
    done = plan(task_json.parent, *overrides, exit_code=2)
    assert "the task is for GPUs, and this machine has none" in done.output


@pytest.mark.slow
def test_plans_from_data_and_writes_what_it_measured(tmp_path):
    ranks = ["topology.world_size=2", "topology.memory_gib=1"]
    data = ["data=synthetic", "data.max_rows=1000", "batch_size=64", "sharder=size_lookup"]
    plan(tmp_path, *data, *ranks, "optimizer=adam", "out=p.json", "task_out=measured.json")
    task = read_task(tmp_path / "measured.json")
    validate(read_plan(tmp_path / "p.json"), task)
    assert (task.batch_size, task.topology.world_size, task.optimizer) == (64, 2, "adam")
    assert (task.topology.memory_bytes, task.topology.bytes_per_element) == (2**30, 12)
    assert all(table.reuse_histogram is not None for table in task.tables)
    assert json.loads((tmp_path / "p.json").read_text())["profiles"] is None

    plan(tmp_path, "task=measured.json", "sharder=size_lookup", "out=q.json")

    assert read_plan(tmp_path / "q.json") == read_plan(tmp_path / "p.json")
