"""scripts/first_gpu.py, rehearsed on the CPU with small sizes."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.cost.learned import learned_cost_model
from dlrm_sharded.fitting.costs_file import read_costs
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.runs.owner import claim
from tests import preloaded
from tests.e2e.runs import ROOT, environment
from tests.processes import children_of, is_running, wait_until

SCRIPT = ROOT / "scripts" / "first_gpu.py"
STEPS = "environment,kernels,train,mlperf,collect,fit,ranks,measured,table_order"
KILLED = "environment,kernels,train,mlperf"
KILLED_AFTER = {"kernels": 2, "train": 1, "mlperf": 3}
"""Steps in which it is killed, and the number of cases that it finishes before."""


def start(out: Path, steps: str) -> subprocess.Popen[str]:
    command = [str(SCRIPT), str(out), "--small", "--steps", steps]
    return preloaded.start(*command, env=environment(), own_process=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def kill(process: subprocess.Popen[str], cases: Path, num_cases: int) -> int:
    """Kill a rehearsal after some cases of a step; return how many it has finished."""
    wait_until(lambda: num_finished(cases) >= num_cases, "it has cases")
    [step] = children_of(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not is_running(step), "the step has ended")
    return num_finished(cases)


def num_finished(cases: Path) -> int:
    """The number of whole lines of cases."""
    return cases.read_text().count('"failures": []}\n') if cases.exists() else 0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a rehearsal."""
    folder = tmp_path_factory.mktemp("rehearsal")
    finish(start(folder, STEPS))
    return folder


def figures_of(out: Path, step: str) -> dict[str, Any]:
    written = json.loads((out / f"{step}.json").read_text())
    assert (written["status"], written["exit_code"], written["failures"]) == ("ok", 0, [])
    assert 0 < written["seconds"] <= written["limit_s"]
    assert written["versions"]["torchrec"]
    assert (out / f"{step}.log").exists()
    return written["figures"]


@pytest.mark.soak
def test_a_killed_rehearsal_continues(tmp_path):
    """No case that had finished before a kill is run again, as `Cases` promises for any step."""
    rehearsal = start(tmp_path, KILLED)
    finished_before = {}
    for step, num_cases in KILLED_AFTER.items():
        finished_before[step] = kill(rehearsal, tmp_path / f"{step}.cases.jsonl", num_cases)
        rehearsal = start(tmp_path, KILLED)
    continued = finish(rehearsal)
    for step in ("environment", "kernels", "train"):
        assert f"{step}: ok, earlier" in continued
    assert "| mlperf | ok | " in continued
    for step, before in finished_before.items():
        assert (tmp_path / f"{step}.log").read_text().count(": finished earlier\n") == before


def test_what_succeeded_is_not_run_again(out):
    names = STEPS.split(",")
    before = [(out / f"{name}.json").stat().st_mtime_ns for name in names]
    output = finish(start(out, STEPS))
    assert all(f"{name}: ok, earlier" in output for name in names)
    assert [(out / f"{name}.json").stat().st_mtime_ns for name in names] == before
    summary = json.loads((out / "summary.json").read_text())["steps"]
    assert {name: step["status"] for name, step in summary.items()} == dict.fromkeys(names, "ok")


def test_another_kind_of_run_needs_another_folder(out):
    done = preloaded.run(str(SCRIPT), str(out), "--steps", "fit", env=environment(), exit_code=2)
    assert "has steps with other settings" in done.stderr


def test_two_at_once_need_two_folders(tmp_path):
    """They would measure each other."""
    owner = claim(tmp_path)
    process = start(tmp_path, "environment")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert f"belongs to a job that is in progress: process {os.getpid()}" in output
    owner.release()
    finish(start(tmp_path, "environment"))


def test_without_a_gpu_only_rehearsals_run(tmp_path):
    command = [str(SCRIPT), str(tmp_path / "real"), "--steps", "kernels"]
    preloaded.run(*command, env=environment(), exit_code=1)
    assert "finds no GPU" in json.loads((tmp_path / "real/kernels.json").read_text())["failures"][0]


def test_environment(out):
    figures = figures_of(out, "environment")
    assert figures["machine"]["packages"]["torch"]
    assert figures["gb_per_s"]["device"] > 0
    assert figures["matmul_tflop_per_s"]["fp32"] > 0


def test_kernels(out):
    figures = figures_of(out, "kernels")
    assert figures["adam"] == "not fused on a CPU"
    for optimizer in ("sgd", "rowwise_adagrad"):
        found = figures[f"{optimizer}, all widths"]
        assert len(found["weight_error"]) == 13
        assert 0 < max(found["weight_error"].values()) < 1e-5
        assert 0 < max(found["lookup_error"].values()) < 1e-6
        assert found["changed_by_zeros"] == []


def test_train(out):
    figures = figures_of(out, "train")
    runs = [figures[name] for name in ("adagrad, base", "adagrad, sparse_dist")]
    assert [run["exit_code"] for run in runs] == [0, 0]
    assert [run["with_torchrun"] for run in runs] == [False, True]
    assert all(run["auroc"] > 0.6 for run in runs)
    assert all(run["peak_gib"] > 0 for run in runs)
    assert figures["adagrad, difference of the pipelines' losses"] < 1e-4


def test_mlperf(out):
    figures = figures_of(out, "mlperf")
    for case in ("64 bf16 sparse_dist", "32 bf16 base"):
        profiled = figures[case]["profiled"]
        assert {"forward", "backward"} <= set(profiled["host_ms_by_part"])
        assert profiled["gpu_busy_share"] is None, "there is no GPU"
        assert (out / figures[case]["trace"]).stat().st_size > 0
        assert 0 < figures[case]["step_ms"] <= figures[case]["step_ms_p90"]
    assert figures["64 fp32 sparse_dist"]["loss"] > 0


def test_collected_costs_make_a_model(out):
    collection = figures_of(out, "collect")["collection"]
    costs = read_costs(out / "costs.parquet")
    assert collection["measurements"] == len(costs.samples) >= 125
    assert {sample.world_size for sample in costs.samples} == {1}
    fit = figures_of(out, "fit")
    model = learned_cost_model(RunContext("cpu"), str(out / fit["artefact"]))
    assert model.name == fit["hardware"] == collection["hardware"]
    assert fit["num_plans"]["fitted"] + fit["num_plans"]["held_out"] == collection["plans"]
    assert fit["held_out_errors"]["forward computation"]["mape"] > 0


def test_ranks(out):
    figures = figures_of(out, "ranks")
    for sharder in ("neuroshard", "torchrec"):
        by_rank = figures["mlperf"][sharder]["by_rank_ms"]
        assert len(by_rank) == 8
        assert figures["mlperf"][sharder]["slowest_rank_ms"] == max(by_rank) > 0
    assert [row["batch_size"] for row in figures["batch_sizes"]] == [64, 128]
    assert all(row["bwd_compute_ns_per_id"] > 0 for row in figures["table_sizes"])
    assert figures["widths"]["together"]["fwd_compute"] > 0
    assert figures["launches"]["batch 64"]["without_sleep_ms"]["bwd_compute"] > 0


def test_measured(out):
    """Under the model that `fit` made, not under the package's."""
    figures = figures_of(out, "measured")
    assert figures["tasks"] == 2
    assert figures["cost_model"] == str(out / figures_of(out, "fit")["artefact"])
    for sharder in ("neuroshard", "torchrec", "size_lookup"):
        assert set(figures["compute_ms"][sharder]) == {"0", "1"}
        assert min(figures["compute_ms"][sharder].values()) > 0
    rows = [json.loads(line) for line in (out / "measured.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert "the model's errors" in (out / "measured.log").read_text()
