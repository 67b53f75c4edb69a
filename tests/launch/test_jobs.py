"""What a sweep makes of a scheduler's words and of what the ranks left behind."""

from pathlib import Path
from typing import cast

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from torchx.runner import Runner
from torchx.specs import AppState, AppStatus

from dlrm_torchx.exchange import Exchange
from dlrm_torchx.jobs import PATIENCE, JobState, SweepJob
from dlrm_torchx.slurm_scheduler import _app_state

FORGOTTEN = "the scheduler says nothing of it any more"
LOST = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"


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
) -> SweepJob:
    """A running job, asked for once."""
    exchange = Exchange(folder)
    if returned:
        exchange.send_return(JobReturn(status=JobStatus.COMPLETED, _return_value=3.0))
    for rank, reason in enumerate(failures):
        exchange.send_failure(rank, reason)
    job = SweepJob(
        num=0,
        title="#0",
        overrides=[],
        config=OmegaConf.create(),
        folder=folder,
        exchange=exchange,
        state=JobState.RUNNING,
        handle="slurm://torchx/1",
    )
    job.poll(cast(Runner, Scheduler(status)))
    return job


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
        (AppStatus(AppState.FAILED, msg="TIMEOUT"), False, (), "failed", "says TIMEOUT"),
        (AppStatus(AppState.FAILED, msg="PREEMPTED"), False, (), "preempted", "nodes"),
        (AppStatus(AppState.CANCELLED, msg="CANCELLED by 7"), False, (), "cancelled", "by 7"),
        (AppStatus(AppState.PENDING), False, (), "pending", None),
        (AppStatus(AppState.RUNNING), True, (), "running", None),
        (AppStatus(AppState.UNKNOWN), False, (), "running", None),
        (None, True, (), "running", None),
    ],
)
def test_end_of_a_job(
    status: AppStatus | None,
    returned: bool,
    failures: tuple[str, ...],
    state: str,
    reason: str | None,
    tmp_path: Path,
) -> None:
    job = after(status, tmp_path, returned=returned, failures=failures)
    assert job.state == state
    assert job.reason is None if reason is None else reason in str(job.reason)
    assert (job.seconds is not None) == (not job.state.is_active)


@pytest.mark.parametrize(
    ("returned", "failures", "state", "reason"),
    [
        (True, (), "succeeded", None),
        (False, ("ValueError: no",), "failed", f"{FORGOTTEN}; ValueError: no"),
        (False, (), "failed", FORGOTTEN),
    ],
)
def test_a_job_that_the_scheduler_forgets(
    returned: bool, failures: tuple[str, ...], state: str, reason: str | None, tmp_path: Path
) -> None:
    job = after(None, tmp_path, returned=returned, failures=failures)
    for _ in range(PATIENCE - 2):
        job.poll(cast(Runner, Scheduler(None)))
    assert job.state == "running"
    job.poll(cast(Runner, Scheduler(None)))
    assert job.state == state
    assert job.reason == reason


def test_what_cannot_be_read_fails_its_job_only(tmp_path: Path) -> None:
    (tmp_path / "return.pickle").write_bytes(b"cut")
    job = after(AppStatus(AppState.SUCCEEDED), tmp_path)
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
def test_slurms_words(word: str, state: AppState) -> None:
    assert _app_state(word) is state


def test_a_failure_before_the_next_start_is_not_the_end(tmp_path: Path) -> None:
    """Slurm says FAILED for a moment before it queues a job again; said twice, it is the end."""
    failed, pending = (AppStatus(state) for state in (AppState.FAILED, AppState.PENDING))
    job = after(pending, tmp_path)
    job.config = OmegaConf.create({"hydra": {"launcher": {"max_retries": 1}}})
    for status, state in [
        (failed, JobState.PENDING),
        (pending, JobState.PENDING),
        (failed, JobState.PENDING),
        (failed, JobState.FAILED),
    ]:
        job.poll(cast(Runner, Scheduler(status)))
        assert job.state == state
