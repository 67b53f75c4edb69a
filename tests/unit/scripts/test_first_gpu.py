"""scripts/first_gpu.py: its cases, what it keeps of them, and its limits."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import first_gpu
from dlrm_sharded.runs.rounds import rounds_file
from first_gpu import Part
from tests.processes import wait_until
from tests.unit.runs.test_rounds import ROUND


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / first_gpu.RESULTS).read_text().splitlines()]


@pytest.fixture
def part(tmp_path: Path) -> Part:
    return Part("name", tmp_path, small=True, ranks=2, ends_at=time.monotonic() + 120)


def test_the_parts_take_as_long_as_is_said() -> None:
    limits = [
        sum(limit_s for _, limit_s in parts.values())
        for parts in (first_gpu.ONE_GPU, first_gpu.SEVERAL_GPUS)
    ]
    assert limits == [480, 600]


def test_a_case_that_fails_says_why_and_does_not_end_the_others(part: Part) -> None:
    part.run("a", ["-c", "print('too hot'); raise SystemExit(3)"], lambda: {"ms": 1.0})
    part.run("b", ["-c", "print('fine')"], lambda: {"ms": 2.0})
    a, b = results(part.out)
    assert (a["part"], a["case"], a["error"], a["ms"]) == ("name", "a", "exit code 3", 1.0)
    assert a["output"] == "too hot\n"
    assert "error" not in b
    assert b["ms"] == 2.0
    assert part.has_failed
    assert part.text() == "too hot\nfine\n"


def test_a_command_that_hangs_is_ended(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has started, also if it does not listen to SIGTERM."""
    monkeypatch.setattr(first_gpu, "END_S", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = f"{deaf} print('sleeps', flush=True); time.sleep(600)"
    program = f"{deaf} import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with part.started(["-c", program]) as process:
        part.await_line("sleeps")
    assert process.returncode == -9
    part.ends_at = time.monotonic() + 0.5
    part.run("hangs", ["-c", child])
    assert results(part.out)[-1]["error"] == "out of time"
    with pytest.raises(TimeoutError, match="no line with 'wakes up'"):
        part.await_line("wakes up")


def test_a_rank_is_found_by_what_its_launcher_gave_it() -> None:
    with pytest.raises(ProcessLookupError, match="rank 1 of launcher -5 does not run"):
        first_gpu.pid_of(1, -5)
    environment = os.environ | {"DLRM_SHARDED_LAUNCHER_PID": "-5"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=environment | own)
        for own in ({"RANK": "0"}, {"RANK": "1"}, {"RANK": "11", "LOCAL_RANK": "1"})
    ]

    def found() -> bool:  # once it has its environment
        try:
            return first_gpu.pid_of(1, -5) == ranks[1].pid
        except ProcessLookupError:
            return False

    wait_until(found, "rank 1 is found", 60)
    for rank in ranks:
        rank.communicate(b"\n")


@pytest.fixture
def measured(part: Part, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Times of steps by case, in ms, that a sweep is to measure in its rounds."""
    step_ms: dict[str, list[float]] = {}

    def run(self: Part, name: str, words: list[str]) -> None:
        self.record(name, words=words)
        [folder] = [Path(word.split("=")[1]) for word in words if "sweep.dir=" in word]
        for case, times in step_ms.items():
            (folder / case).mkdir(parents=True)
            for number, ms in enumerate(times):
                line = dataclasses.replace(
                    ROUND, round=number, step_ms=ms, embedding_cost_ms=ms / 2
                )
                rounds_file(folder / case).append(dataclasses.asdict(line))
            (folder / case / "result.json").write_text('{"loss": 0.5}')

    monkeypatch.setattr(Part, "run", run)
    return step_ms


def test_the_defaults_are_compared_with_the_fastest_other(part, measured):
    measured |= {"base": [6.0, 8.0, 7.0], "sparse_dist": [9.0], "default": [4.0, 5.0, 3.5]}
    first_gpu.mlperf(part, first_gpu.SHARE, 8192)
    by_case = {line["case"]: line for line in results(part.out)}
    assert "+case=base,sparse_dist,base_graph,default" in by_case["sweep"]["words"]
    base = by_case["base"]
    assert (base["step_ms"], base["embedding_cost_ms"], base["rounds"]) == (7.0, 3.5, 3)
    assert base["result"] == {"loss": 0.5}
    assert by_case["base_graph"] == {
        **{"part": "name", "case": "base_graph", "rounds": 0, "error": "no round was measured"}
    }
    compared = by_case["default over the fastest other"]
    assert (compared["fastest"], compared["ratio"]) == ("base", pytest.approx(4 / 7))
    assert part.has_failed
    default = (part.out / "conf" / "case" / "default.yaml").read_text()
    assert default == "# @package _global_\n{}\n"
