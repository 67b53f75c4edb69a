"""One job of a sweep: its state, what it is remembered by, and the app that runs it."""

from __future__ import annotations

import dataclasses
import enum
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
from dlrm_torchx.exchange import Exchange
from dlrm_torchx.slurm_scheduler import slurm_log

log = logging.getLogger(__name__)

LOG_NAME = "job.log"
CANCEL_ATTEMPTS = 3
LOST_PEER = re.compile(r"peer|connection|broken pipe|remote process", re.IGNORECASE)
"""In the error of a rank that another one has left."""


class JobState(enum.StrEnum):
    """`skipped`: a glob named an option that lacks a value; the others as schedulers say."""

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
    """A combination of overrides, and what became of it.

    Args:
        num: its number in the sweep.
        title: its number, and what is swept over: those overrides that are not of all jobs.
        overrides: of this job, as Hydra's sweeper made them.
        config: composed, with Hydra's own node.
        folder: what it writes; Hydra's output directory.
        seconds: from submission to its end, time in a queue included.
        retries: how often the scheduler starts it again after a failure.
    """

    num: int
    title: str
    overrides: list[str]
    config: DictConfig
    folder: Path
    exchange: Exchange
    state: JobState = JobState.NOT_STARTED
    reason: str | None = None
    handle: str | None = None
    log: Path | None = None
    seconds: float | None = None
    started_s: float = 0.0
    returned: JobReturn | None = None
    retries: int = 0
    clock: Callable[[], float] = time.monotonic
    _gone_since_s: float | None = None

    def submit(self, runner: Runner, app: AppDef, scheduler: str, args: dict[str, Any]) -> None:
        """Hand the app to the scheduler; whatever that raises passes."""
        if scheduler == "local_cwd":  # which starts nothing again
            args = {**args, "log_dir": str(self.exchange.folder)}
        else:
            self.retries = app.roles[0].max_retries
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started_s = self.clock()
        self.handle = runner.run(app, scheduler, args)
        self.state = JobState.PENDING
        self.log = self._link_log(scheduler, args)

    def poll(self, runner: Runner, *, patience_s: float) -> None:
        """Ask the scheduler, and take in the job's end.

        Args:
            patience_s: for how long it may say what is perhaps not the end: that the job failed,
                with retries left, or that it does not know it.
        """
        assert self.handle is not None
        try:
            status = runner.status(self.handle)
        except Exception as error:  # of whatever client a scheduler has: out of reach for now
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
        return status.state == AppState.FAILED and status.num_restarts < self.retries

    def cancel(self, runner: Runner) -> None:
        assert self.handle is not None
        self.seconds = self.clock() - self.started_s
        self.state, self.reason = JobState.CANCELLED, "the sweep was stopped"
        for attempt in range(CANCEL_ATTEMPTS):
            try:
                runner.cancel(self.handle)
                return
            except Exception as error:  # of whatever client a scheduler has
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

    def _end(self, status: AppStatus) -> None:
        if status.state == AppState.SUCCEEDED:
            self._succeed()
        elif status.state == AppState.CANCELLED:
            by_whom = "by another command" if status.msg in ("", NONE) else status.msg
            self.state, self.reason = JobState.CANCELLED, by_whom
        elif status.msg.startswith("PREEMPTED"):
            self.state, self.reason = JobState.PREEMPTED, "the scheduler gave its nodes to another"
        else:
            self.fail(self._failure(status))

    def _succeed(self) -> None:
        if not self.exchange.has_return():
            self.fail(
                f"it ended well, but {self.exchange.folder} has no result of it; the sweep's "
                "folder must be on a disk that jobs share with this machine"
            )
            return
        try:
            self.returned = self.exchange.receive_return()
        except Exception as error:  # whatever a class raises that is built again here
            self.fail(f"what it returned cannot be read here: {type(error).__name__}: {error}")
        else:
            self.state = JobState.SUCCEEDED

    def _failure(self, status: AppStatus) -> str:
        """What the scheduler knows better (TIMEOUT, OUT_OF_MEMORY), then what the ranks say."""
        reasons = []
        if status.msg not in ("", "FAILED", NONE):
            reasons.append(f"the scheduler says {status.msg}")
        first = self.exchange.receive_failure()
        if first is not None:
            reasons.append(first.reason)
        if not reasons or (first is not None and LOST_PEER.search(first.reason)):
            reasons.append("a rank ended without a word: killed, or out of memory?")
        return "; ".join(reasons)

    def _status_by_files(self) -> AppStatus:
        """Of a job that the scheduler knows no more."""
        if self.exchange.has_return():
            return AppStatus(AppState.SUCCEEDED)
        return AppStatus(AppState.FAILED, msg="nothing of it any more")

    def _link_log(self, scheduler: str, args: dict[str, Any]) -> Path | None:
        """A name in the job's folder for where the scheduler puts the job's output."""
        app_id = parse_app_handle(self.handle or "").app_id
        if scheduler == "local_cwd":
            target = self.exchange.folder / "torchx" / app_id / ROLE / "0" / "combined.log"
        elif scheduler == "slurm":
            target = slurm_log(app_id, ROLE, 0, folder=args.get("log_dir"))
        else:
            return None
        link = self.folder / LOG_NAME
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, self.folder.resolve()))
        except OSError:  # a disk without links; the job runs all the same
            return target
        return link
