"""Sweeps: jobs that fail, wait for each other, are stopped, or start again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchx.runner import get_runner

from dlrm_sharded.ranks.process import kept_signals
from dlrm_sharded.runs.owner import claim
from dlrm_torchx.jobs import SweepApp, SweepJob
from dlrm_torchx.mailbox import JobMailbox
from dlrm_torchx.options import SweepOptions
from dlrm_torchx.signals import STOPPING_SIGNALS, delayed_signals, raise_on_signals
from dlrm_torchx.sweep import Sweep
from tests import preloaded
from tests.launch.conftest import LISTENING, jobs_of, states_of
from tests.processes import wait_until

pytestmark = pytest.mark.slow


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


def test_a_failing_job_does_not_end_the_sweep(run_sweep, tmp_path):
    done = run_sweep(
        "+do=raise_on_1,exit,die_on_1,succeed", "hydra.launcher.max_parallel=2", exit_code=1
    )
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


def test_one_rank_that_fails_is_enough(run_sweep, tmp_path):
    """Also after rank 0 has returned, and its return alone would look like success."""
    run_sweep("+do=raise_on_1_after_0", exit_code=1)
    [job] = jobs_of(tmp_path / "sweep")
    assert job["reason"] == "ValueError: no luck on rank 1"


def test_environment_and_objective(run_sweep, tmp_path):
    done = run_sweep("+do=read_environment", "hydra.launcher.env={NUMBER: 42.5}")
    assert states_of(tmp_path / "sweep") == ["succeeded"]
    assert "#0 0: succeeded" in done.stdout
    assert "its submission: returned 42.5" in done.stdout


@pytest.mark.parametrize("most", [1, 2])
def test_max_parallel(most, sweep_command, tmp_path):
    """Two jobs that wait for each other end only if both run."""
    command = sweep_command("+do=meet_a,meet_b", f"hydra.launcher.max_parallel={most}")
    process = preloaded.start(*command, cwd=tmp_path)
    if most == 1:
        wait_until(lambda: (tmp_path / "meet_a").exists(), "the first job runs")
        assert states_of(tmp_path / "sweep")[1] == "not_started"
        assert not (tmp_path / "meet_b").exists()
        (tmp_path / "meet_b").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert states_of(tmp_path / "sweep") == ["succeeded", "succeeded"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143)], ids=["ctrl_c", "kill"]
)
def test_stopping_ends_the_apps(number, code, sweep_command, tmp_path):
    command = sweep_command("+do=hang,succeed", "hydra.launcher.after=json.loads")
    process = preloaded.start(*command, cwd=tmp_path, before=LISTENING, own_process=True)
    wait_until(lambda: all((tmp_path / f"hangs_{i}").exists() for i in (0, 1)), "both ranks hang")
    assert processes_naming(str(tmp_path / "sweep" / ".torchx"))
    process.send_signal(number)
    said, _ = process.communicate()
    assert "continue the sweep, repeat its command with hydra.sweep.dir=sweep" in said
    assert process.returncode != 0
    assert code is None or process.returncode == code
    wait_until(
        lambda: not processes_naming(str(tmp_path / "sweep" / ".torchx")), "no process is left"
    )
    assert states_of(tmp_path / "sweep") == ["cancelled", "not_started"]
    reasons = [job["reason"] for job in jobs_of(tmp_path / "sweep")]
    assert reasons == ["the sweep was stopped", "the sweep was stopped before"]


def test_reasons_are_those_of_the_last_attempt(run_sweep, tmp_path):
    run_sweep("+do=raise_then_die", "hydra.launcher.max_restarts=1", exit_code=1)
    (job,) = jobs_of(tmp_path / "sweep")
    assert job["state"] == "failed"
    assert job["reason"] == "a rank ended without a message: killed, or out of memory?"


def test_a_sweep_has_one_driver(run_sweep, tmp_path):
    after = "hydra.launcher.after=json.loads"
    run_sweep("+do=succeed", after)
    driver = claim(tmp_path / "sweep", key="hydra.sweep.dir")
    try:
        done = run_sweep("+do=raise", after, exit_code=1)
    finally:
        driver.release()
    assert f"in progress: process {os.getpid()} on " in done.stderr
    assert "give another hydra.sweep.dir" in done.stderr


def test_a_job_of_a_sweep_owns_its_folder(run_sweep, tmp_path):
    """Hydra writes its files only to a folder that is the job's."""
    own = "+hydra.callbacks.own._target_=dlrm_sharded.commands.own_folder.OwnRunFolder"
    other = claim(tmp_path / "sweep" / "0")
    try:
        done = run_sweep("+do=succeed", own, exit_code=1)
    finally:
        other.release()
    assert f"in progress: process {os.getpid()} on " in done.stderr
    assert not (tmp_path / "sweep" / "0" / ".hydra").exists()


def test_a_folder_with_a_sweep_is_left_alone(run_sweep, tmp_path):
    after = "hydra.launcher.after=json.loads"
    run_sweep("+do=succeed", after)
    before = (tmp_path / "sweep" / "sweep.json").read_text()
    done = run_sweep("+do=raise", after, exit_code=1)
    assert "holds a sweep already, with its comparison; give another" in done.stderr
    assert "sweep.json has those of its 1 job" in done.stderr
    assert (tmp_path / "sweep" / "sweep.json").read_text() == before


def test_a_stopped_sweep_is_taken_up(run_sweep, tmp_path):
    """What has succeeded is not run again; the others go on, and are informed."""
    jobs = "+do=count,succeed_when_resumed"
    overrides = [jobs, "+resume=null", "hydra.launcher.after=json.loads"]
    run_sweep(*overrides, exit_code=1)
    assert states_of(tmp_path / "sweep") == ["succeeded", "failed"]
    before = jobs_of(tmp_path / "sweep")[0]

    second = run_sweep(*overrides)
    assert "sweep of 2 jobs: succeeded: 1, still running: 0, starting again: 1" in second.stdout
    assert "#1 +do=succeed_when_resumed: succeeded" in second.stdout
    assert re.search(r"#1 .* succeeded .* s after its submission: returned 1\n", second.stdout), (
        "it was given resume=auto"
    )
    assert states_of(tmp_path / "sweep") == ["succeeded", "succeeded"]
    assert jobs_of(tmp_path / "sweep")[0] == before

    third = run_sweep(*overrides)
    assert "succeeded: 2, still running: 0, starting again: 0" in third.stdout
    assert [(tmp_path / f"starts_{rank}").read_text() for rank in (0, 1)] == ["x", "x"]


def test_a_sweep_whose_driver_was_killed(sweep_command, run_sweep, tmp_path):
    """Its job on this machine ends with it, and starts again when the sweep is taken up."""
    overrides = ["+do=meet_a,succeed", "hydra.launcher.after=json.loads"]
    driver = subprocess.Popen(
        [*LISTENING, sys.executable, *sweep_command(*overrides)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: (tmp_path / "meet_a").exists(), "the first job runs")
    with driver:
        driver.kill()
    folder = str(tmp_path / "sweep" / ".torchx")
    wait_until(lambda: not processes_naming(folder), "no process is left")
    (tmp_path / "meet_b").touch()
    done = run_sweep(*overrides)
    assert "succeeded: 0, still running: 0, starting again: 1" in done.stdout
    assert states_of(tmp_path / "sweep") == ["succeeded", "succeeded"]


def test_jobs_have_folders_of_their_own(run_sweep, tmp_path):
    done = run_sweep("+do=succeed,raise", "hydra.sweep.subdir=same", exit_code=1)
    assert "#0 +do=succeed and #1 +do=raise have the same folder" in done.stderr
    assert not (tmp_path / "sweep" / "sweep.json").exists()


def test_every_job_meets_at_a_port_of_its_own(tmp_path):
    options = SweepOptions(scheduler="slurm", j="2x1", cpu=1, gpu=0, after=None)
    with get_runner() as runner:
        sweep = Sweep(options, [], [], tmp_path, runner)
    box = JobMailbox(tmp_path)
    jobs = [SweepJob(num, "", [], OmegaConf.create(), tmp_path, box) for num in range(300)]
    apps = [sweep.app_of(SweepApp([job], box), "train") for job in jobs]
    assert len({app.roles[0].port_map["c10d"] for app in apps}) == 300


def test_signals_wait_and_end_as_they_were():
    reached = []

    def kill_oneself() -> None:
        with delayed_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end of the block")

    def own(number: int, frame: object) -> None:
        raise AssertionError

    outer = signal.signal(signal.SIGTERM, own)
    try:
        with kept_signals(STOPPING_SIGNALS) as before:
            raise_on_signals(before)
            with pytest.raises(SystemExit) as ended:
                kill_oneself()
        assert reached
        assert ended.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, outer)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra.launcher.scheduler=nowhere", ["hydra.launcher.scheduler", "'nowhere'", "slurm"]),
        ("hydra.launcher.j=2", ["hydra.launcher.j is '2'", "NODESxRANKS"]),
        ("hydra.launcher.scheduler=slurm", ["hydra.launcher.j is 'not set'", "2x8"]),
        ("hydra.launcher.max_parallel=0", ["hydra.launcher.max_parallel is 0", ">= 1"]),
        (
            "hydra.launcher.scheduler_args={queue: a}",
            ["scheduler_args.queue", "log_dir", "local_cwd"],
        ),
        ("hydra.launcher.gpus=1", ["hydra.launcher.gpus", "known there", "max_restarts"]),
        ("hydra.launcher.env={A: null}", ["hydra.launcher.env.A is null"]),
        ("hydra.launcher.after=dlrm_sharded.runs.nope", ["hydra.launcher.after", "nope"]),
        ("sharder=random,dmi", ["there is no sharder 'dmi'; known: ", "size_lookup"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_before_submission(override, said, tmp_path):
    command = ("-m", "dlrm_sharded.train", "-m", f"hydra.sweep.dir={tmp_path}", "seed=0,1")
    done = preloaded.run(*command, override, exit_code=2)
    for word in said:
        assert word in done.stderr
    assert not (tmp_path / "sweep.json").exists()
