"""What a sweep makes of a scheduler's words and of what the ranks left behind."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from torchx.runner import Runner
from torchx.specs import AppState, AppStatus

from dlrm_torchx.compose import swept_overrides
from dlrm_torchx.jobs import PATIENCE_S, JobState, SweepApp, SweepJob
from dlrm_torchx.mailbox import JobMailbox
from dlrm_torchx.slurm_scheduler import TolerantSlurmScheduler, _app_state
from dlrm_torchx.sweep import Sweep

pytestmark = pytest.mark.slow

FORGOTTEN = "the scheduler says the job is unknown"
LOST = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"
FAILED, PENDING, RUNNING = map(AppStatus, (AppState.FAILED, AppState.PENDING, AppState.RUNNING))


class Scheduler:
    """A runner that always gives the same answer."""

    def __init__(self, status: AppStatus | None) -> None:
        self._status = status

    def status(self, handle: str) -> AppStatus | None:
        if self._status is not None and self._status.state == AppState.UNKNOWN:
            raise OSError("the scheduler is away")
        return self._status


def after(
    status: AppStatus | None,
    folder: Path,
    *,
    returned: bool = False,
    failures: tuple[str, ...] = (),
    retries: int = 0,
) -> tuple[SweepApp, SweepJob]:
    """A running app and its job, asked for once."""
    mailbox = JobMailbox(folder, attempt="1")
    if returned:
        mailbox.send_return(JobReturn(status=JobStatus.COMPLETED, _return_value=3.0))
    for rank, reason in enumerate(failures):
        mailbox.send_failure(rank, reason)
    job = SweepJob(0, "#0", [], OmegaConf.create(), folder, mailbox)
    app = SweepApp([job], mailbox, retries=retries)
    with patch("dlrm_torchx.jobs.time.monotonic", lambda: 0.0):
        app.await_app("slurm://torchx/1", JobState.RUNNING)
    poll(app, status, at_s=0.0)
    return app, job


def poll(app: SweepApp, status: AppStatus | None, *, at_s: float) -> None:
    with patch("dlrm_torchx.jobs.time.monotonic", lambda: at_s):
        app.poll(cast(Runner, Scheduler(status)))


@pytest.mark.parametrize(
    ("status", "returned", "failures", "state", "reason"),
    [
        (AppStatus(AppState.SUCCEEDED), True, (), "succeeded", None),
        (AppStatus(AppState.SUCCEEDED), False, (), "failed", "must be on a disk"),
        (AppStatus(AppState.FAILED), True, ("ValueError: no",), "failed", "ValueError: no"),
        (AppStatus(AppState.FAILED), False, ("first", "second"), "failed", "first"),
        (AppStatus(AppState.FAILED), False, (), "failed", "killed, or out of memory?"),
        (AppStatus(AppState.FAILED), False, (LOST,), "failed", f"{LOST}; a rank ended without"),
        (
            AppStatus(AppState.FAILED, msg="OUT_OF_MEMORY"),
            False,
            ("ValueError: no",),
            "failed",
            "the scheduler says OUT_OF_MEMORY; ValueError: no",
        ),
        (AppStatus(AppState.FAILED, msg="PREEMPTED"), False, (), "preempted", "nodes"),
        (AppStatus(AppState.CANCELLED, msg="CANCELLED by 7"), False, (), "cancelled", "by 7"),
        (AppStatus(AppState.PENDING), False, (), "pending", None),
        (AppStatus(AppState.RUNNING), True, (), "running", None),
        (AppStatus(AppState.UNKNOWN), False, (), "running", None),
        (None, True, (), "running", None),
    ],
)
def test_end_of_a_job(status, returned, failures, state, reason, tmp_path):
    _, job = after(status, tmp_path, returned=returned, failures=failures)
    assert job.state == state
    assert job.reason is None if reason is None else reason in str(job.reason)
    assert (job.seconds is not None) == (not job.state.is_active)


def test_constants_are_no_labels():
    """Whatever their spelling: sweepers write `False` for a `false` that was typed."""
    task = [
        "data.pregenerate=false",
        "+data.x=1e-3",
        "data.y=[1, 2]",
        "seed=1,2",
        "sharder=dim,size",
    ]
    sweep = {"overrides": {"task": task}, "sweeper": {"params": {"explain": True}}}
    job = ["explain=True", "data.pregenerate=False", "+data.x=0.001", "data.y=[1,2]", "sharder=dim"]
    assert swept_overrides(job, OmegaConf.create({"hydra": sweep})) == ["sharder=dim"]


def test_a_job_may_have_no_throughput(tmp_path, caplog):
    caplog.set_level("INFO")
    _, job = after(AppStatus(AppState.SUCCEEDED), tmp_path, returned=True)
    job.config = OmegaConf.create({"objective": "samples_per_s"})
    for value, rounds in ((2500.0, None), (math.nan, 6)):
        job.returned = JobReturn(status=JobStatus.COMPLETED, _return_value=value)
        options = SimpleNamespace(rounds=rounds)
        Sweep._log_end(cast(Sweep, SimpleNamespace(options=options)), job)
    assert caplog.messages[0].endswith(" s after its submission: samples_per_s 2,500")
    no_value = " s after the submission of all jobs: samples_per_s unknown"
    assert caplog.messages[1].endswith(no_value)


@pytest.mark.parametrize(
    ("returned", "failures", "state", "reason"),
    [
        (True, (), "succeeded", None),
        (False, ("ValueError: no",), "failed", f"{FORGOTTEN}; ValueError: no"),
        (False, (), "failed", FORGOTTEN),
    ],
)
def test_a_job_that_the_scheduler_forgets(returned, failures, state, reason, tmp_path):
    app, job = after(None, tmp_path, returned=returned, failures=failures)
    poll(app, RUNNING, at_s=PATIENCE_S)
    for at_s in (PATIENCE_S + 1, 2 * PATIENCE_S):
        poll(app, None, at_s=at_s)
        assert job.state == "running"
    poll(app, None, at_s=2 * PATIENCE_S + 1)
    assert job.state == state
    assert job.seconds == PATIENCE_S + 1
    assert job.reason == reason


def test_what_cannot_be_read_fails_its_job_only(tmp_path):
    (tmp_path / "return_1.pickle").write_bytes(b"cut")
    _, job = after(AppStatus(AppState.SUCCEEDED), tmp_path)
    assert job.state == "failed"
    assert "what it returned cannot be read here" in str(job.reason)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", AppState.SUCCEEDED),
        ("COMPLETING", AppState.RUNNING),
        ("CANCELLED by 1000", AppState.CANCELLED),
        ("PREEMPTED", AppState.FAILED),
        ("REQUEUED", AppState.PENDING),
        ("A_WORD_OF_TOMORROW", AppState.FAILED),
    ],
)
def test_slurms_words(word, state):
    assert _app_state(word) is state


def failed_after(restarts: int) -> AppStatus:
    return AppStatus(AppState.FAILED, num_restarts=restarts)


def test_a_failed_job_with_retries_left_may_be_queued_late(tmp_path):
    """However often the scheduler is asked meanwhile."""
    app, job = after(RUNNING, tmp_path, retries=1)
    for tenth in range(10 * int(PATIENCE_S)):
        poll(app, failed_after(0), at_s=5 + tenth / 10)
        assert job.state == "running"
    poll(app, PENDING, at_s=5 + PATIENCE_S)
    assert job.state == "pending"
    poll(app, failed_after(0), at_s=6 + PATIENCE_S)
    assert job.state == "pending"
    poll(app, failed_after(0), at_s=6 + 2 * PATIENCE_S)
    assert (job.state, job.seconds) == ("failed", 6 + PATIENCE_S)


@pytest.mark.parametrize(
    ("retries", "restarts"),
    [(0, 0), (2, 2), (2, 3)],
    ids=["none_wanted", "used_up", "preempted_too"],
)
def test_a_failure_without_retries_left_is_the_end(retries, restarts, tmp_path):
    app, job = after(RUNNING, tmp_path, retries=retries)
    poll(app, failed_after(restarts), at_s=5.0)
    assert job.state == "failed"
    assert job.seconds == 5.0


@pytest.mark.parametrize(
    ("queue", "accounting", "word", "restarts"),
    [
        ("1+0|a-0|COMPLETING|1|None\n1+1|a-1|PENDING|1|Priority\n", "", "PENDING (Priority)", 1),
        ("1+0|a-0|PENDING|0|None\n1+1|a-1|PENDING|0|None\n", "", "PENDING", 0),
        ("1+0|a-0|FAILED|1|None\n1+1|a-1|FAILED|1|NonZeroExitCode\n", "", "FAILED", 1),
        ("1+0|a-0|FAILED|1|None\n1+1|a-1|FAILED|0|NonZeroExitCode\n", "", "FAILED", 0),
        ("", "1+0|a-0|FAILED\n1+1|a-1|FAILED\n", "FAILED", -1),
    ],
    ids=["queued_again", "queued", "at_the_last_time", "in_between", "forgotten"],
)
def test_what_slurm_says_of_a_job(queue, accounting, word, restarts, monkeypatch):
    """What it waits for, and how often it was started again."""

    def run(command: list[str], **options: object) -> SimpleNamespace:
        said = {"squeue": queue, "sacct": accounting}[command[0]]
        return SimpleNamespace(returncode=0, stdout=said, stderr="")

    monkeypatch.setattr("dlrm_torchx.slurm_scheduler.subprocess.run", run)
    described = TolerantSlurmScheduler("session").describe("1")
    assert (described.msg, described.num_restarts) == (word, restarts)
    assert described.state is _app_state(word)
