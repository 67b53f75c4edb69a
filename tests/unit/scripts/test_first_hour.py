"""The runner of the first hour's steps, with steps that do little; and what steps compute."""

import gzip
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import first_gpu
from dlrm_sharded.files.errors import ConfigError
from first_hour import mlperf, traces
from studies import archive, command_line, runner, store
from studies.study import StudyRun
from tests.preloaded import ROOT
from tests.processes import children_of, is_running, wait_until

RECORD = """
from pathlib import Path
from studies.study import StudyRun
run = StudyRun({name!r}, Path.cwd(), seconds=60, small=True)
run.record("answer", 42.123456)
run.show(answer="42")
Path("starts").open("a").write({name!r} + " ")
"""
SLEEPS = """
import subprocess, sys, time
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, start_new_session=True)
Path("child").write_text(str(child.pid))
time.sleep(600)
"""


CASES = """
import time
def case(name):
    Path("cases").open("a").write(name + " ")
    while name == Path("hangs").read_text():
        time.sleep(0.05)
    run.check(name != Path("fails").read_text(), "too large")
    return name.upper()
run.cases.plan(["a", "b", "c", "d"])
for name in run.cases.planned:
    run.record(name, run.case(name, lambda: case(name)))
raise SystemExit(len(run.failures))
"""
"""A step of four cases; files say in which of them it hangs and which of them fails."""

KILLED = """
import sys
from pathlib import Path
from tests.unit.scripts.test_first_hour import CASES, run_steps
run_steps(Path(sys.argv[1]), {"step": CASES})
"""


def run_steps(
    out: Path, programs: dict[str, str], *, limit_s: float = 600, **steps: Any
) -> list[Any]:
    """Outcomes of steps, each a program that records a figure before it does what is given."""

    def command(step: runner.Study, seconds: float) -> list[str]:
        return [sys.executable, "-c", RECORD.format(name=step.name) + programs[step.name]]

    every = {"limit_s": 60.0, "least_s": 0.0}
    studies = [runner.Study(name, **every | steps.get(name, {})) for name in programs]
    return runner.Runner(out, command=command, settings={"small": True}).run(studies, limit_s)


def test_a_failing_step_stops_no_other(tmp_path):
    steps = {
        "crash": ("import os; os.abort()", "failed"),
        "error": ("raise ValueError('what went wrong')", "failed"),
        "check": ("run.check(False, 'too large'); raise SystemExit(1)", "failed"),
        "good": ("", "ok"),
        "orphan": ("", "no files"),
        "child": ("Path('made.parquet').touch()", "ok"),
        "heir": ("", "ok"),
    }
    outcomes = run_steps(
        tmp_path,
        {name: program for name, (program, _) in steps.items()},
        orphan={"needs": ("no_*.parquet",)},
        heir={"needs": ("no_*.parquet", "made.*")},
    )
    assert {o.step: o.status for o in outcomes} == {name: ends for name, (_, ends) in steps.items()}
    by_name = {outcome.step: outcome for outcome in outcomes}
    assert by_name["crash"].exit_code == -6
    assert by_name["crash"].figures == {"answer": 42.123}, "it keeps what it found out before"
    assert by_name["error"].last_lines[-1] == "ValueError: what went wrong"
    assert by_name["check"].failures == ["too large"]
    assert not list(tmp_path.glob("*.figures.json"))
    written = json.loads((tmp_path / "error.json").read_text())
    assert (written["status"], written["exit_code"]) == ("failed", 1)
    assert written["versions"]["python"] == platform.python_version()
    table = runner.closing_table(outcomes)
    assert "| error | failed | " in table
    assert "too large" in table
    assert "ValueError: what went wrong" in table
    steps = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert set(steps) == set(by_name) - {"orphan"}
    assert steps["good"]["headline"] == {"answer": "42"}


def test_a_hanging_step_is_killed_with_its_children(tmp_path):
    outcomes = run_steps(tmp_path, {"hang": SLEEPS, "good": ""}, hang={"limit_s": 8.0})
    assert [outcome.status for outcome in outcomes] == ["timed out", "ok"]
    assert outcomes[0].figures == {"answer": 42.123}
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child), "a child in a session of its own has ended", 60)


def test_steps_share_the_time(tmp_path):
    outcomes = run_steps(
        tmp_path,
        {"long": "", "short": ""},
        limit_s=50,
        long={"least_s": 51.0},
    )
    assert [outcome.status for outcome in outcomes] == ["no time left", "ok"]
    assert outcomes[1].limit_s <= 50
    assert not (tmp_path / "long.json").exists()


def test_what_succeeded_is_not_run_again(tmp_path):
    run_steps(tmp_path, {"good": "", "bad": "raise SystemExit(3)"})
    outcomes = run_steps(tmp_path, {"good": "", "bad": "", "new": ""})
    assert [(o.step, o.status, o.is_earlier) for o in outcomes] == [
        ("good", "ok", True),
        ("bad", "ok", False),
        ("new", "ok", False),
    ]
    assert outcomes[0].figures == {"answer": 42.123}
    assert (tmp_path / "starts").read_text().split() == ["good", "bad", "bad", "new"]
    with pytest.raises(ConfigError, match="steps with other settings"):
        runner.Runner(tmp_path, command=lambda *of: [], settings={"small": False})


@pytest.mark.parametrize("moment", range(4))
def test_a_kill_at_any_moment_loses_no_finished_case(tmp_path, moment):
    """The runner and all that it started are killed in case a, b, c or d."""
    (tmp_path / "hangs").write_text("abcd"[moment])
    (tmp_path / "fails").write_text("none")
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        start_new_session=True,
    )
    begun, ended = tmp_path / "cases", tmp_path / "step.cases.jsonl"
    wait_until(
        lambda: begun.exists() and len(begun.read_text().split()) > moment, "the case has begun"
    )
    [step] = children_of(killed.pid)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    wait_until(lambda: not is_running(step), "the step has ended")
    assert ended.read_text().count('"case"') == moment
    with ended.open("a") as file:
        file.write('{"case": "d", "fig')  # what a kill may leave of a line
    (tmp_path / "hangs").write_text("none")

    [none] = run_steps(tmp_path, {"step": CASES}, limit_s=-1)
    [outcome] = run_steps(tmp_path, {"step": CASES})

    assert none.status == "no time left"
    text = runner.missing_text(none)
    assert text.startswith(f"{moment} of 4 cases are finished; the same command runs the others: ")
    assert text.endswith(", ".join("abcd"[moment:]))
    assert outcome.status == "ok"
    assert outcome.figures == {"answer": 42.123, "a": "A", "b": "B", "c": "C", "d": "D"}
    again = "abcd"[moment]
    assert sorted(begun.read_text().split()) == sorted(["a", "b", "c", "d", again])
    assert not ended.exists(), "who removes step.json repeats all cases"


def test_only_failed_cases_are_run_again(tmp_path):
    (tmp_path / "hangs").write_text("none")
    (tmp_path / "fails").write_text("c")
    [failed] = run_steps(tmp_path, {"step": CASES})
    assert (failed.status, failed.num_finished, failed.missing) == ("failed", 3, ["c"])
    assert "3 of 4 cases are finished" in runner.closing_table([failed])
    (tmp_path / "fails").write_text("none")
    [outcome] = run_steps(tmp_path, {"step": CASES})
    assert outcome.status == "ok"
    assert (tmp_path / "cases").read_text().split() == ["a", "b", "c", "d", "c"]


@pytest.mark.parametrize("spoiled", ['{"case": "b", "fig', "5\n", "[]\n", "null\n", "{}\n"])
def test_a_spoiled_line_does_not_spoil_the_next(tmp_path, spoiled):
    """It was cut off, or is JSON that no case writes."""
    path = tmp_path / "step.cases.jsonl"
    cases = store.Cases(path, {"commit": "one"})
    cases.plan(["a", "b"])
    cases.add("a", 1.5, [])
    with path.open("a") as file:
        file.write(spoiled)
    store.Cases(path, {"commit": "one"}).add("b", None, [])
    again = store.Cases(path)
    assert (again.num_finished, again.missing, again.ended["a"].figures) == (2, [], 1.5)


def test_what_was_run_under_other_conditions_does_not_count(tmp_path, monkeypatch, capsys):
    (tmp_path / "hangs").write_text("none")
    (tmp_path / "fails").write_text("d")
    programs = {"good": "", "step": CASES}
    for commit, starts in {"old": 1, "new": 2}.items():
        now = {"commit": commit, "hardware": "a CPU"}
        monkeypatch.setattr(runner, "conditions", lambda now=now: now)
        outcomes = run_steps(tmp_path, programs)
        assert [outcome.is_earlier for outcome in outcomes] == [False, False]
        assert (tmp_path / "cases").read_text().split() == starts * ["a", "b", "c", "d"]
    printed = capsys.readouterr().out
    assert "good: does not count, as it was run under other conditions" in printed
    assert "commit 'old', now 'new'" in printed
    assert "step: 4 cases were run under other conditions" in printed


def test_limits_of_the_steps():
    """A call takes 27 minutes, and any one step fits into ten."""
    assert first_gpu.LIMIT_S <= 27 * 60
    assert sum(step.least_s for step in first_gpu.STEPS) <= first_gpu.LIMIT_S / 2
    assert all(step.least_s <= step.limit_s < 570 for step in first_gpu.STEPS)
    for step in first_gpu.STEPS:
        assert step.commands or (ROOT / "scripts" / "first_hour" / f"{step.name}.py").exists()
        for commands in (step.commands, step.small):
            parts = {command.split()[0] for command in commands}
            assert len(parts) <= 1, "one part reports the rows of all commands"


def test_a_step_that_timed_out_says_after_how_many_cases(tmp_path, capsys):
    """The archive has what it left behind."""
    (tmp_path / "hangs").write_text("c")
    (tmp_path / "fails").write_text("")
    [outcome] = run_steps(tmp_path, {"step": CASES}, step={"limit_s": 8.0})
    assert (outcome.status, outcome.num_finished, outcome.missing) == ("timed out", 2, ["c", "d"])
    assert "step: timed out after 2 cases\n" in capsys.readouterr().out
    with tarfile.open(tmp_path / archive.ARCHIVE) as packed:
        inside = {name.partition("/")[2]: name for name in packed.getnames()}
        text = packed.extractfile(inside["step.cases.jsonl"]).read().decode()
    assert text.count('"failures": []}') == 2
    assert {"settings.json", "step.json", "step.log", "summary.json"} <= inside.keys()


def test_an_archive_has_figures_and_logs_alone(tmp_path):
    """Also those of a first hour within a bring-up, but no traces and no runs."""
    packed = ("step.json", "step.log", "report.md", "gpu/train.json", "gpu/train.cases.jsonl")
    others = ("costs.parquet", "train/base/result.json", "gpu/train/x.log", "traces/a.json")
    for name in (*packed, *others):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(name)
    for _ in range(2):  # the second one replaces the first
        path = archive.write_archive(tmp_path / "out")
    with tarfile.open(path) as found:
        assert sorted(found.getnames()) == sorted(f"out/{name}" for name in packed)


def test_libraries_are_loaded_before_the_first_step(tmp_path):
    """A module that is missing, or a disk that is too slow, is left to the steps."""
    for program, limit_s in (("open('loaded', 'w')", 60), ("import time; time.sleep(600)", 0.5)):
        (tmp_path / "slow_module.py").write_text(program)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            command_line._import_once(["slow_module"], limit_s=limit_s)
            command_line._import_once(["no_such_module"], limit_s=60)
    assert (tmp_path / "loaded").exists()


def test_cases_that_may_be_left_out_come_last():
    """One that is compiled changes no other, so fp32 at the large size may follow it."""
    cases = mlperf.cases_of(64, 8, torch.device("cuda"), small=False)
    assert [case.name for case in cases[-2:]] == [
        "64 fp32 sparse_dist",
        "8 bf16 sparse_dist, compiled reduce-overhead",
    ]
    rehearsed = mlperf.cases_of(64, 8, torch.device("cpu"), small=True)
    assert {case.name for case in rehearsed} < {case.name for case in cases}
    assert len({case.name for case in cases}) == len(cases)


def test_a_case_leaves_no_compiled_layers(monkeypatch):
    layers = {name: nn.Linear(1, 1) for name in ("dense_arch", "inter_arch", "over_arch")}
    built = SimpleNamespace(model=SimpleNamespace(**layers))
    for mode in ("default", None):
        mlperf._prepare(built, mlperf.Case(8, "bf16", compile_mode=mode))
        is_compiled = [layer._compiled_call_impl is not None for layer in layers.values()]
        assert is_compiled == [mode is not None] * 3


def test_parts_that_are_left_out_are_failures(tmp_path):
    run = StudyRun("some", tmp_path, seconds=100, small=True)
    assert run.has_time("short", 1)
    assert run.failures == []
    assert not run.has_time("long", 1000)
    assert run.failures == ["long: left out: 100 s left, needs 1000 s"]


def test_traces(tmp_path):
    def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}

    events = [
        event("kernel", "gemm", 1000, 100),
        event("kernel", "gemm", 1050, 100),  # on another stream, half of it at the same time
        event("gpu_memcpy", "Memcpy HtoD", 1350, 50),
        event("gpu_user_annotation", "## forward 3 ##", 0, 9000),
        event("user_annotation", "## forward 3 ##", 0, 4000),
        event("user_annotation", "## forward 4 ##", 5000, 2000),
        event("user_annotation", "ProfilerStep", 0, 9000),
        event("cuda_runtime", "cudaLaunchKernel", 0, 10),
        {"ph": "i", "name": "a moment", "ts": 5},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert traces.summary(traces.read_events(path), num_steps=2) == {
        "gpu_busy_share": 0.5,  # 150 and 50 of 400
        "kernels_per_step": 1.5,
        "host_ms_by_part": {"forward": 3.0},
        "cuda_calls_ms": {"cudaLaunchKernel": 0.005},
        "kernels_ms": {"gemm": 0.1, "Memcpy HtoD": 0.025},
    }
    assert traces.summary(events[-2:-1], num_steps=1)["gpu_busy_share"] is None
