"""Sweeps: jobs that fail, wait for each other, are stopped, or start again."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import jobs_of, states_of, wait_until

TORCHX = str(Path(sys.executable).with_name("torchx"))
Run = Callable[..., subprocess.CompletedProcess[str]]


def processes_naming(text: str) -> list[str]:
    """Command lines of living processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_a_failing_job_does_not_end_the_sweep(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("+do=raise_on_1,exit,die_on_1,succeed", "hydra.launcher.max_parallel=2")
    assert done.returncode == 1
    jobs = jobs_of(tmp_path / "sweep")
    assert [job["state"] for job in jobs] == ["failed", "failed", "failed", "succeeded"]
    reasons = [job["reason"] for job in jobs]
    assert reasons[0] == "ValueError: no luck on rank 1"
    assert reasons[1] == "exit code 7"
    assert "killed" in reasons[2]
    assert reasons[3] is None
    closing = done.stderr[-3000:]
    assert "3 of 4 jobs did not succeed" in closing
    for job in jobs[:3]:
        assert f"#{job['num']} {job['overrides'][-1]}: failed: {job['reason']}" in closing
        log = tmp_path / "sweep" / job["log"]
        assert f"log: sweep/{job['log']}" in closing
        assert log.exists()
    assert "no luck on rank 1" in (tmp_path / "sweep" / jobs[0]["log"]).read_text()


def test_one_rank_that_fails_is_enough(run_sweep: Run, tmp_path: Path) -> None:
    """Also after rank 0 has returned, and its return alone would look like success."""
    done = run_sweep("+do=raise_on_1_after_0")
    assert done.returncode == 1
    assert [job["reason"] for job in jobs_of(tmp_path / "sweep")] == [
        "ValueError: no luck on rank 1"
    ]


def test_environment_and_objective(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("+do=read_environment", "hydra.launcher.env={NUMBER: 42.5}")
    assert done.returncode == 0, done.stderr
    assert states_of(tmp_path / "sweep") == ["succeeded"]
    assert "#0 0: succeeded" in done.stdout
    assert ": 42.5" in done.stdout


@pytest.mark.parametrize("most", [1, 2])
def test_max_parallel(most: int, sweep_command: Callable[..., list[str]], tmp_path: Path) -> None:
    """Two jobs that wait for each other end only if both run."""
    command = sweep_command("+do=meet_a,meet_b", f"hydra.launcher.max_parallel={most}")
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if most == 1:
        wait_until(lambda: (tmp_path / "meet_a").exists(), "the first job runs")
        assert states_of(tmp_path / "sweep")[1] == "not_started"
        assert not (tmp_path / "meet_b").exists()
        (tmp_path / "meet_b").touch()
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert states_of(tmp_path / "sweep") == ["succeeded", "succeeded"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143)], ids=["ctrl_c", "kill"]
)
def test_stopping_ends_the_apps(
    number: int, code: int | None, sweep_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        sweep_command("+do=hang,succeed"), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: all((tmp_path / f"hangs_{i}").exists() for i in (0, 1)), "both ranks hang")
    assert processes_naming(str(tmp_path / "sweep" / ".torchx"))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert code is None or process.returncode == code
    wait_until(
        lambda: not processes_naming(str(tmp_path / "sweep" / ".torchx")), "no process is left", 15
    )
    assert states_of(tmp_path / "sweep") == ["cancelled", "not_started"]


def test_a_job_that_another_command_cancels(
    sweep_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        sweep_command("+do=hang,succeed"), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: all((tmp_path / f"hangs_{i}").exists() for i in (0, 1)), "both ranks hang")
    handle = jobs_of(tmp_path / "sweep")[0]["app"]
    status = subprocess.run([TORCHX, "status", handle], capture_output=True, text=True, check=True)
    assert "State: RUNNING" in status.stdout
    subprocess.run([TORCHX, "cancel", handle], capture_output=True, check=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert states_of(tmp_path / "sweep") == ["cancelled", "succeeded"]
    assert "#0 +do=hang: cancelled" in said
    status = subprocess.run([TORCHX, "status", handle], capture_output=True, text=True, check=True)
    assert "State: CANCELLED" in status.stdout


def test_torchrun_starts_the_ranks_again(run_sweep: Run, tmp_path: Path) -> None:
    done = run_sweep("+do=succeed_at_second", "hydra.launcher.max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert states_of(tmp_path / "sweep") == ["succeeded"]
    assert {path.name for path in tmp_path.glob("first_*")} == {"first_0", "first_1"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra.launcher.scheduler=nowhere", ["hydra.launcher.scheduler", "'nowhere'", "slurm"]),
        ("hydra.launcher.j=2", ["hydra.launcher.j is '2'", "NODESxRANKS"]),
        ("hydra.launcher.scheduler=slurm", ["hydra.launcher.j is not set", "2x8"]),
        ("hydra.launcher.gpu=1", ["hydra.launcher.j is '1x2'", "gpu is 1"]),
        ("hydra.launcher.max_parallel=0", ["hydra.launcher.max_parallel is 0", ">= 1"]),
        ("hydra.launcher.poll_s=0", ["hydra.launcher.poll_s is 0", "> 0"]),
        (
            "hydra.launcher.scheduler_args={queue: a}",
            ["scheduler_args.queue", "log_dir", "local_cwd"],
        ),
        ("hydra.launcher.gpus=1", ["hydra.launcher.gpus", "known there", "max_restarts"]),
        ("sharder=random,dmi", ["sharder/dmi", "size_lookup"]),
        ("sharder.sede=1,2", ["sharder.sede"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_before_submission(override: str, said: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlrm_sharded.train", "-m", f"hydra.sweep.dir={tmp_path}"),
            *("seed=0,1", override),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    for word in said:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "sweep.json").exists()
