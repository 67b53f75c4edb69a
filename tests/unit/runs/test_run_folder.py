"""Runs are found wherever they lie, each once, and what is broken or missing has a reason."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.runs.run_folder import Run, find_runs
from tests.unit.runs.test_result import result_of

RESULT: dict[str, Any] = {**dataclasses.asdict(result_of()), "sharder": "dim"}


def write_run(
    folder: Path, overrides: list[str] | None, result: dict[str, Any] | str | None = None
) -> None:
    """A run's folder, as far as it got."""
    folder.mkdir(parents=True, exist_ok=True)
    if overrides is not None:
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text(
            "".join(f"- {override}\n" for override in overrides) or "[]\n"
        )
    if result is not None:
        text = result if isinstance(result, str) else json.dumps(result)
        (folder / "result.json").write_text(text)


def write_sweep(folder: Path, *jobs: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))


def only(folder: Path) -> Run:
    (run,), _ = find_runs([folder])
    return run


def test_a_run_with_all_it_says(tmp_path):
    overrides = ["sharder=dim", "seed=3", "+data.x=1", "batch_size=64", "sharder.seed=9"]
    write_run(tmp_path / "dim", [*overrides, "hydra.job.name=x", "hydra/launcher=basic"], RESULT)
    run = only(tmp_path)
    assert (run.name, run.sharder, run.seed) == ("dim", "dim", 3)
    assert run.state == "succeeded"
    assert (run.setting, run.options) == ("batch_size=64 data.x=1", "seed=9")
    assert run.result == dataclasses.replace(result_of(), sharder="dim")


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        ("false", "False"),
        ("1e-3", "0.001"),
        ("10_000", "10000"),
        ("0.10", "0.1"),
        ("[1, 2.0,true]", "[1,2.0,True]"),
        ("1.2.3", "1.2.3"),
        ("/data/1e3", "/data/1e3"),
    ],
)
def test_a_value_has_the_spelling_of_sweepers(tmp_path, typed, spelled):
    """Else runs that differ in nothing would have rows of their own."""
    for name, value in {"typed": typed, "spelled": spelled}.items():
        write_run(tmp_path / name, ["sharder=dim", f"data.x={value}"], RESULT)
    one, other = find_runs([tmp_path])[0]
    assert one.setting == other.setting == f"data.x={spelled}"


def test_a_start_that_was_refused_is_no_run(tmp_path):
    """Nothing is planned there; Hydra has written its files."""
    for name in ("refused", "killed"):
        write_run(tmp_path / name, ["sharder=dim"])
    (tmp_path / "killed" / "plan.json").write_text("{}")
    run = only(tmp_path)
    assert (run.name, run.state) == ("killed", "unfinished")


@pytest.mark.parametrize("text", ['{"sharder": "dim", "embed', "", "[1]", "{}"])
def test_a_broken_result_is_a_run_that_did_not_succeed(tmp_path, text):
    write_run(tmp_path / "dim", ["sharder=dim", "seed=1"], text)
    run = only(tmp_path)
    assert (run.state, run.result) == ("unreadable", None)
    assert "result.json" in str(run.reason)
    assert (run.sharder, run.seed) == ("dim", 1)


def test_jobs_of_a_sweep_that_left_nothing(tmp_path):
    first = {"overrides": ["seed=1"], "choices": {"sharder": "dim"}, "folder": "dim_0"}
    second = {"overrides": ["sharder=size"], "folder": "size_1", "log": "1.txt", "seconds": 2.5}
    second |= {"state": "failed", "reason": "out of memory"}
    write_sweep(tmp_path, first | {"state": "not_started"}, second)
    (tmp_path / "1.txt").touch()
    one, other = find_runs([tmp_path])[0]
    assert (one.name, one.sharder, one.seed, one.state) == ("dim_0", "dim", 1, "not_started")
    assert (one.reason, one.log) == (None, None)
    assert (other.sharder, other.state, other.reason) == ("size", "failed", "out of memory")
    assert (other.log, other.seconds) == ("1.txt", 2.5)


@pytest.mark.parametrize(
    ("state", "result", "expected"),
    [
        ("succeeded", RESULT, "succeeded"),
        ("succeeded", None, "without result.json"),
        ("failed", RESULT, "failed"),
        ("preempted", None, "preempted"),
        ("running", RESULT, "succeeded"),
        ("running", None, "running"),
        (None, RESULT, "succeeded"),
    ],
)
def test_the_state_is_the_sweeps_unless_a_result_knows_better(tmp_path, state, result, expected):
    write_run(tmp_path / "dim_0", ["sharder=dim"], result)
    write_sweep(tmp_path, {"overrides": ["sharder=dim"], "folder": "dim_0", "state": state})
    run = only(tmp_path)
    assert run.state == expected
    assert (run.result is not None) == (expected == "succeeded")


def test_each_run_once_however_it_is_reached(tmp_path):
    sweep = tmp_path / "runs" / "sweep"
    write_run(sweep / "dim_0", ["sharder=dim"], RESULT)
    write_run(sweep / "size_1", ["sharder=size"], RESULT)
    write_sweep(sweep, *({"folder": name, "state": "failed"} for name in ("dim_0", "size_1")))
    (tmp_path / "link").symlink_to(sweep / "dim_0")
    runs = find_runs([sweep, tmp_path / "runs", sweep / "dim_0", tmp_path / "link"])[0]
    assert [(run.name, run.state) for run in runs] == [
        ("sweep/dim_0", "failed"),
        ("sweep/size_1", "failed"),
    ]
    alone = only(sweep / "dim_0")
    assert (alone.name, alone.state) == ("dim_0", "failed")


def test_a_tree_of_sweeps_and_runs(tmp_path):
    for folder in ("sweep/dim_0", "sweep/dim_1", "2026/size", "deep/er/random"):
        write_run(tmp_path / folder, [], RESULT)
    write_run(tmp_path / ".cache" / "dim", [], RESULT)
    write_run(tmp_path / "other_tool", None, {"score": 1})
    write_run(tmp_path / "copied", None, RESULT)
    states = {run.name: run.state for run in find_runs([tmp_path])[0]}
    assert states.pop("other_tool") == "unreadable"
    assert [*states] == ["2026/size", "copied", "deep/er/random", "sweep/dim_0", "sweep/dim_1"]


def test_the_sharder_is_named_as_it_was_chosen(tmp_path):
    """Runs that failed have no result to name it, and must share a row with those that did not."""
    write_run(tmp_path / "a", ["sharder=plan_file", "sharder.path=x.json"], RESULT)
    write_run(tmp_path / "b", ["sharder=dim", "sharder._target_=my.Own"], RESULT)
    write_run(tmp_path / "c", [], RESULT)
    hydra = "hydra: {runtime: {choices: {sharder: size_lookup}}}\n"
    (tmp_path / "c" / ".hydra" / "hydra.yaml").write_text(hydra)
    write_run(tmp_path / "d", [], RESULT)
    (tmp_path / "d" / ".hydra" / "hydra.yaml").write_text("hydra: [")
    runs, _ = find_runs([tmp_path])
    assert [run.sharder for run in runs] == ["plan_file", "my.Own", "size_lookup", "dim"]
    assert [run.options for run in runs] == ["path=x.json", "", "", ""]


def test_no_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no runs in .*empty.*result\.json.*sweep\.json"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(DataError, match="missing is not a folder"):
        find_runs([tmp_path, tmp_path / "missing"])


@pytest.mark.parametrize("text", ["{", '{"jobs": 1}', '{"jobs": [{"folder": 1}]}'])
def test_a_damaged_sweep_costs_no_run(tmp_path, text):
    write_run(tmp_path / "dim_0", ["sharder=dim"], RESULT)
    (tmp_path / "sweep.json").write_text(text)
    runs, (problem,) = find_runs([tmp_path])
    assert [run.name for run in runs] == ["dim_0"]
    assert problem.endswith("its jobs that left no folder are not counted")
