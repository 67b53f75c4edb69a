"""One job of a sweep: its state, its record in sweep.json, and the app that runs it."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig
from torchx.runner import Runner
from torchx.specs import AppDef, AppState, AppStatus
from torchx.specs.api import NONE, parse_app_handle

from dlrm_torchx.app import ROLE
from dlrm_torchx.mailbox import JobMailbox
from dlrm_torchx.slurm_scheduler import slurm_log

log = logging.getLogger(__name__)

LOG_NAME = "job.log"
CANCEL_ATTEMPTS = 3
LOST_PEER = re.compile(r"peer|connection|broken pipe|remote process", re.IGNORECASE)
"""Words in the error of a rank that lost the connection to another rank."""


class JobState(enum.StrEnum):
    """The states of schedulers, and `skipped`: a glob chose an option that lacks a value."""

    NOT_STARTED = "not_started"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    SKIPPED = "skipped"

    @property
    def is_active(self) -> bool:
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclasses.dataclass
class SweepJob:
    """A combination of overrides, and the state of the app that runs it.

    Args:
        num: number of the job in the sweep.
        title: the number, and the overrides that not all jobs have.
        overrides: all overrides, as Hydra's sweeper made them.
        config: the composed config, with Hydra's own node.
        folder: Hydra's output directory.
        seconds: time from submission to the end, with the time in a queue.
        retries: how often the scheduler starts the job again after a failure.
        is_restart: whether the job has started before, in a sweep that was stopped.
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
    started_s: float = 0.0
    returned: JobReturn | None = None
    retries: int = 0
    is_restart: bool = False
    clock: Callable[[], float] = time.monotonic
    _gone_since_s: float | None = None

    @property
    def label(self) -> str:
        """Overrides that tell the job from others, without its seed."""
        parts = self.title.split()[1:]
        return " ".join(part for part in parts if not part.startswith("seed=")) or self.title

    def submit(self, runner: Runner, app: AppDef, scheduler: str, args: dict[str, Any]) -> None:
        """Submit the app to the scheduler, whose errors pass."""
        if scheduler == "local_cwd":  # it never starts an app again
            args = {**args, "log_dir": str(self.mailbox.folder)}
        else:
            self.retries = app.roles[0].max_retries
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started_s = self.clock()
        self.handle = runner.run(app, scheduler, args)
        self.state = JobState.PENDING
        self.log = self._link_log(scheduler, args)

    def poll(self, runner: Runner, *, patience_s: float) -> None:
        """Ask the scheduler for the job's state, and record its end.

        Args:
            patience_s: time for which a job may be unknown, or failed with retries left, before
                that counts as its end.
        """
        assert self.handle is not None
        try:
            status = runner.status(self.handle)
        except Exception as error:  # any client's error: the scheduler is out of reach for now
            log.debug("%s: %s", self.title, error)
            return
        if status is not None and not status.is_terminal():
            running = status.state == AppState.RUNNING
            self.state = JobState.RUNNING if running else JobState.PENDING
            self._gone_since_s = None
            return
        now_s = self.clock()
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        if self._may_come_back(status) and now_s - self._gone_since_s < patience_s:
            return
        self.seconds = self._gone_since_s - self.started_s
        self._end(status or self._status_by_files())

    def _may_come_back(self, status: AppStatus | None) -> bool:
        if status is None:
            return True
        return status.state == AppState.FAILED and 0 < self.retries > status.num_restarts

    def cancel(self, runner: Runner) -> None:
        assert self.handle is not None
        self.seconds = self.clock() - self.started_s
        self.state, self.reason = JobState.CANCELLED, "the sweep was stopped"
        for attempt in range(CANCEL_ATTEMPTS):
            try:
                runner.cancel(self.handle)
                return
            except Exception as error:  # any client's error
                self.reason = f"the sweep was stopped, but the job may run on: {error}"
            time.sleep(attempt)

    def fail(self, reason: str) -> None:
        self.state, self.reason = JobState.FAILED, reason

    def to_json(self, sweep_dir: Path) -> dict[str, Any]:
        choices = self.config.hydra.runtime.choices
        return {
            "num": self.num,
            "overrides": self.overrides,
            "choices": {
                str(group): choice
                for group, choice in choices.items()
                if not str(group).startswith("hydra/")
            },
            "folder": os.path.relpath(self.folder, sweep_dir),
            "state": str(self.state),
            "reason": self.reason,
            "log": None if self.log is None else os.path.relpath(self.log, sweep_dir),
            "app": self.handle,
            "seconds": self.seconds,
        }

    def take_end(self) -> bool:
        """Take the end of a job that runs beside others in one app; return whether it has one."""
        if self.mailbox.has_return():
            reason = self.take_return()
        else:
            reason = self.mailbox.receive_first_failure()
            if reason is None:
                return False
        if reason is not None:
            self.fail(reason)
        self.seconds = self.clock() - self.started_s
        return True

    def _end(self, status: AppStatus) -> None:
        if status.state == AppState.SUCCEEDED:
            if reason := self.take_return():
                self.fail(reason)
        elif status.state == AppState.CANCELLED:
            by_whom = "by another command" if status.msg in ("", NONE) else status.msg
            self.state, self.reason = JobState.CANCELLED, by_whom
        elif status.msg.startswith("PREEMPTED"):
            self.state, self.reason = JobState.PREEMPTED, "the scheduler gave its nodes to another"
        else:
            self.fail(self._failure(status))

    def take_return(self) -> str | None:
        """Take what the job returned, with which it has succeeded; return why it cannot be had."""
        if not self.mailbox.has_return():
            return (
                f"it succeeded, but its result is not in {self.mailbox.folder}; the sweep's "
                "folder must be on a disk that jobs share with this machine"
            )
        try:
            self.returned = self.mailbox.receive_return()
        except Exception as error:  # unpickling may raise anything
            return f"what it returned cannot be read here: {type(error).__name__}: {error}"
        self.state = JobState.SUCCEEDED
        return None

    def _failure(self, status: AppStatus) -> str:
        """Return the scheduler's reason (TIMEOUT, OUT_OF_MEMORY), then the ranks' own."""
        reasons = []
        if status.msg not in ("", "FAILED", NONE):
            reasons.append(f"the scheduler says {status.msg}")
        first = self.mailbox.receive_first_failure()
        if first is not None:
            reasons.append(first)
        elif said := _structured_message(status):
            reasons.append(said)
        if not reasons or (first is not None and LOST_PEER.search(first)):
            reasons.append("a rank ended without a message: killed, or out of memory?")
        return "; ".join(reasons)

    def _status_by_files(self) -> AppStatus:
        """Infer the final status of a job that the scheduler has forgotten."""
        if self.mailbox.has_return():
            return AppStatus(AppState.SUCCEEDED)
        return AppStatus(AppState.FAILED, msg="the job is unknown")

    def _link_log(self, scheduler: str, args: dict[str, Any]) -> Path | None:
        """Link the job's output, which the scheduler places elsewhere, into the job's folder."""
        app_id = parse_app_handle(self.handle or "").app_id
        if scheduler == "local_cwd":
            target = self.mailbox.folder / "torchx" / app_id / ROLE / "0" / "combined.log"
        elif scheduler == "slurm":
            target = slurm_log(app_id, ROLE, 0, folder=args.get("log_dir"))
        else:
            return None
        link = self.folder / LOG_NAME
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, self.folder.resolve()))
        except OSError:  # the disk has no links; the job runs all the same
            return target
        return link


def _structured_message(status: AppStatus) -> str | None:
    """Return the message of the error file that the launcher has left to TorchX."""
    try:
        message = json.loads(status.structured_error_msg)["message"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(message)
