"""The jobs of a sweep with their records in sweep.json, and the apps that run them."""

from __future__ import annotations

import enum
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus
from torchx.specs.api import NONE, parse_app_handle

from dlrm_sharded.files.json_files import read_json_object
from dlrm_torchx.app import ROLE
from dlrm_torchx.mailbox import JobMailbox
from dlrm_torchx.slurm_scheduler import slurm_log

log = logging.getLogger(__name__)

RECORD = "sweep.json"
PATIENCE_S = 120.0
"""Time for which an app may be unknown, or failed with retries left, before it counts as ended."""

LOST_PEER = re.compile(r"peer|connection|broken pipe|remote process", re.IGNORECASE)
"""Words in the error of a rank that lost the connection to another rank."""


class JobState(enum.StrEnum):
    """The state of a job in its scheduler, or before it is submitted."""

    NOT_STARTED = "not_started"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"

    @property
    def is_active(self) -> bool:
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass
class SweepJob:
    """A combination of overrides, and the outcome of its job.

    Args:
        num: number of the job in the sweep.
        title: the number, and the overrides that distinguish the job from others.
        overrides: all overrides, as Hydra's sweeper wrote them.
        config: the composed config, with Hydra's own node.
        folder: Hydra's output directory.
        handle, log: the app that runs the job, and its output.
        seconds: time from submission to the end, including the time in a queue.
        is_restart: whether the job was started before, in a sweep that was stopped.
    """

    num: int
    title: str
    overrides: list[str]
    config: DictConfig
    folder: Path
    mailbox: JobMailbox
    state: JobState = JobState.NOT_STARTED
    reason: str | None = None
    handle: str | None = None
    log: Path | None = None
    seconds: float | None = None
    returned: JobReturn | None = None
    is_restart: bool = False

    def fail(self, reason: str) -> None:
        self.state, self.reason = JobState.FAILED, reason

    def take_end(self) -> bool:
        """Read the result or failure that the ranks left; return whether the job has ended."""
        if not self.mailbox.has_return():
            if (reason := self.mailbox.receive_first_failure()) is not None:
                self.fail(reason)
            return reason is not None
        try:
            self.returned = self.mailbox.receive_return()
            self.state = JobState.SUCCEEDED
        except Exception as error:  # unpickling may raise anything
            self.fail(f"what it returned cannot be read here: {type(error).__name__}: {error}")
        return True

    def to_json(self, sweep_dir: Path) -> dict[str, Any]:
        choices = {str(key): value for key, value in self.config.hydra.runtime.choices.items()}
        return {
            "num": self.num,
            "overrides": self.overrides,
            "choices": {k: v for k, v in choices.items() if not k.startswith("hydra/")},
            "folder": os.path.relpath(self.folder, sweep_dir),
            "state": str(self.state),
            "reason": self.reason,
            "log": None if self.log is None else os.path.relpath(self.log, sweep_dir),
            "app": self.handle,
            "seconds": self.seconds,
        }


@dataclass
class SweepApp:
    """A TorchX app that runs one job of a sweep, or all of them in rounds.

    Args:
        mailbox: where its ranks leave their results: its job's mailbox, or in rounds its own.
        in_rounds: whether it runs all jobs, whose results it leaves in their mailboxes.
        retries: how often the scheduler restarts it after a failure.
        waits_for: text about what it waits for in the queue, if the scheduler says that.
    """

    jobs: Sequence[SweepJob]
    mailbox: JobMailbox
    in_rounds: bool = False
    handle: str = ""
    state: JobState = JobState.NOT_STARTED
    reason: str | None = None
    retries: int = 0
    started_s: float = 0.0
    waits_for: str = ""
    _gone_since_s: float | None = None

    @property
    def active_jobs(self) -> list[SweepJob]:
        return [job for job in self.jobs if job.state.is_active]

    def submit(self, runner: Runner, app: AppDef, scheduler: str, args: dict[str, Any]) -> None:
        """Submit the app to the scheduler; its errors propagate."""
        if scheduler == "local_cwd":
            args = {**args, "log_dir": str(self.mailbox.folder)}
        for job in self.jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
        self.await_app(runner.run(app, scheduler, args), JobState.PENDING)
        for job in self.active_jobs:
            job.handle, job.log = self.handle, self._link_log(job, scheduler, args)

    def await_app(self, handle: str, state: JobState) -> None:
        """Begin to watch an app that this or an earlier driver submitted."""
        self.handle, self.state, self.started_s = handle, state, time.monotonic()
        for job in self.jobs:
            if job.state is JobState.NOT_STARTED:
                job.state = state

    def poll(self, runner: Runner) -> None:
        """Ask the scheduler for the app's state, and record the jobs that ended."""
        self._take_ends()
        try:
            status = runner.status(self.handle)
        except Exception as error:  # any client's error: the scheduler is unreachable for now
            log.debug("%s: %s", self.handle, error)
            return
        if status is not None and not status.is_terminal():
            self._gone_since_s = None
            self._set_state(state_of(status))
            cause = status.msg.partition(" ")[2] if self.state is JobState.PENDING else ""
            self.waits_for = cause and f"jobs wait in the queue {cause}"
            return
        now_s = time.monotonic()
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        may_come_back = status is None or (
            status.state == AppState.FAILED and 0 < self.retries > status.num_restarts
        )
        if may_come_back and now_s - self._gone_since_s < PATIENCE_S:
            return
        if status is None:  # the scheduler has forgotten the app: its files say how it ended
            state = AppState.SUCCEEDED if self.mailbox.has_return() else AppState.FAILED
            status = AppStatus(state, msg="the job is unknown")
        self._end(status, self._gone_since_s - self.started_s)

    def cancel(self, runner: Runner) -> None:
        reason = "the sweep was stopped"
        try:
            runner.cancel(self.handle)
        except Exception as error:  # any client's error
            reason = f"{reason}, but the job may run on: {error}"
        self._set_state(JobState.CANCELLED, reason, time.monotonic() - self.started_s)

    def _set_state(
        self, state: JobState, reason: str | None = None, seconds: float | None = None
    ) -> None:
        """Set the state of the app, and of its jobs that have not ended."""
        for job in self.active_jobs:
            job.state, job.reason, job.seconds = state, reason, seconds
        self.state, self.reason = state, reason

    def _take_ends(self) -> None:
        for job in self.active_jobs if self.in_rounds else ():
            if job.take_end():
                job.seconds = time.monotonic() - self.started_s

    def _end(self, status: AppStatus, seconds: float) -> None:
        self._take_ends()
        if status.state == AppState.SUCCEEDED:
            for job in self.active_jobs:
                job.seconds = seconds
                if job.take_end():
                    continue
                job.fail(
                    "the ranks ended before it began"
                    if self.in_rounds
                    else f"it succeeded, but its result is not in {job.mailbox.folder}; the "
                    "sweep's folder must be on a disk that jobs share with this machine"
                )
            self.state = JobState.SUCCEEDED
        elif status.state == AppState.CANCELLED:
            by_whom = "by another command" if status.msg in ("", NONE) else status.msg
            self._set_state(JobState.CANCELLED, by_whom, seconds)
        elif status.msg.startswith("PREEMPTED"):
            reason = "the scheduler gave its nodes to another"
            self._set_state(JobState.PREEMPTED, reason, seconds)
        else:
            self._set_state(JobState.FAILED, self._failure(status), seconds)

    def _failure(self, status: AppStatus) -> str:
        """Return the scheduler's reason (TIMEOUT, OUT_OF_MEMORY), then the ranks' reason."""
        reasons = []
        if status.msg not in ("", "FAILED", NONE):
            reasons.append(f"the scheduler says {status.msg}")
        first = self.mailbox.receive_first_failure()
        if first is not None:
            reasons.append(first)
        if not reasons or (first is not None and LOST_PEER.search(first)):
            reasons.append("a rank ended without a message: killed, or out of memory?")
        return "; ".join(reasons)

    def _link_log(self, job: SweepJob, scheduler: str, args: dict[str, Any]) -> Path | None:
        """Link the app's output, which the scheduler places elsewhere, into a job's folder."""
        app_id = parse_app_handle(self.handle).app_id
        if scheduler == "local_cwd":
            target = self.mailbox.folder / "torchx" / app_id / ROLE / "0" / "combined.log"
        elif scheduler == "slurm":
            target = slurm_log(app_id, ROLE, 0, folder=args.get("log_dir"))
        else:
            return None
        link = job.folder / "job.log"
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, job.folder.resolve()))
        except OSError:  # the disk does not support links; the job runs anyway
            return target
        return link


def state_of(status: AppStatus | None) -> JobState:
    """Return the state of an app; an app that the scheduler does not know has failed."""
    if status is not None and not status.is_terminal():
        return JobState.RUNNING if status.state == AppState.RUNNING else JobState.PENDING
    succeeded = status is not None and status.state == AppState.SUCCEEDED
    return JobState.SUCCEEDED if succeeded else JobState.FAILED


def recorded_jobs(sweep_dir: Path) -> list[dict[str, Any]]:
    """Return the job records of an earlier sweep in the folder; empty if there is none."""
    path = sweep_dir / RECORD
    return list(read_json_object(path, noun="sweep")["jobs"]) if path.exists() else []
