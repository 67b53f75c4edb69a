"""Takes up a stopped sweep: finds what its jobs have done, and what is left to do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchx.runner import Runner
from torchx.specs import AppState

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.files.json_forms import read_form
from dlrm_torchx.jobs import JobState, SweepJob

log = logging.getLogger(__name__)

RECORD = "sweep.json"


@dataclass(frozen=True, slots=True)
class _Job:
    """The parts of a job in sweep.json that are read when a sweep is taken up."""

    num: int
    overrides: list[str]
    state: JobState
    app: str | None
    log: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class _Record:
    jobs: list[_Job]


def recorded_jobs(sweep_dir: Path) -> list[dict[str, Any]]:
    """Return the records of the jobs of an earlier sweep in the folder, if there are any."""
    path = sweep_dir / RECORD
    if not path.exists():
        return []
    fields = read_json_object(path, noun="sweep")
    read_form(
        fields,
        _Record,
        name=f"{path} is damaged, so that this sweep needs another hydra.sweep.dir",
        error=ConfigError,
        may_have_others=True,
    )
    jobs: list[dict[str, Any]] = fields["jobs"]
    return jobs


def check_same_sweep(
    jobs: Sequence[SweepJob], records: Sequence[dict[str, Any]], sweep_dir: Path
) -> None:
    """Raise ConfigError unless the folder's sweep had exactly these jobs."""
    then = [record["overrides"] for record in records]
    if then == [job.overrides for job in jobs]:
        return
    reason = f"it has {len(then)} jobs, and these are {len(jobs)}"
    if len(then) > len(jobs) and then[: len(jobs)] == [job.overrides for job in jobs]:
        reason = "it ran in batches, which cannot be taken up"
    elif len(then) == len(jobs):
        num = next(i for i, job in enumerate(jobs) if job.overrides != then[i])
        here, there = (
            " ".join(item for item in one if item not in other)
            for one, other in ((jobs[num].overrides, then[num]), (then[num], jobs[num].overrides))
        )
        reason = f"its #{num} is {there!r}, and this one is {here!r}"
    raise ConfigError(
        f"{sweep_dir} holds a sweep already, with its comparison; give another hydra.sweep.dir, "
        f"or the overrides of that sweep to take it up ({reason})"
    )


def take_up(
    jobs: Sequence[SweepJob],
    records: Sequence[dict[str, Any]],
    sweep_dir: Path,
    runner: Runner,
    *,
    in_one_app: bool = False,
) -> None:
    """Set the state of jobs that have succeeded or still run; the others start again.

    Args:
        in_one_app: whether one app runs all jobs, one after another. Then a job has succeeded if it
            has returned, however the app ended.

    Raises:
        ConfigError: a job still runs on this machine, without its driver.
    """
    for job, record in zip(jobs, records, strict=True):
        if job.state is JobState.SKIPPED or record["app"] is None:
            continue
        state = JobState(record["state"])
        if state.is_active or in_one_app:  # the driver was killed
            state = state_now(record["app"], runner)
        is_local = record["app"].startswith("local")
        if state.is_active and is_local and not in_one_app:  # nobody will know how it ends
            raise ConfigError(
                f"{job.title} of the stopped sweep still runs; wait for its end, or end it "
                f"with `torchx cancel {record['app']}`"
            )
        if in_one_app and (job.mailbox.has_return() or not state.is_active):
            state = JobState.SUCCEEDED if job.mailbox.has_return() else JobState.FAILED
        if state is JobState.SUCCEEDED:
            if reason := job.take_return():
                log.info("%s: %s", job.title, reason)
        elif state.is_active:
            job.state, job.started_s = state, job.clock()
        if job.state is JobState.NOT_STARTED:
            job.is_restart = True
            _resume(job.config)
        else:
            job.handle, job.seconds = record["app"], record["seconds"]
            job.log = None if record["log"] is None else sweep_dir / record["log"]
    counts = {
        "have succeeded": sum(job.state is JobState.SUCCEEDED for job in jobs),
        "still run": sum(job.state.is_active for job in jobs),
        "start again": sum(job.is_restart for job in jobs),
    }
    log.info(
        "taking up a stopped sweep of %d jobs: %s",
        len(jobs),
        ", ".join(f"{count} {what}" for what, count in counts.items()),
    )


def state_now(app: str, runner: Runner) -> JobState:
    """Return how an app is; one that the scheduler does not know has failed."""
    status = runner.status(app)
    if status is None:
        return JobState.FAILED
    if not status.is_terminal():
        return JobState.RUNNING if status.state == AppState.RUNNING else JobState.PENDING
    return JobState.SUCCEEDED if status.state == AppState.SUCCEEDED else JobState.FAILED


def _resume(config: DictConfig) -> None:
    """Let a training run go on at its checkpoint, unless the user says what it starts from.

    The key is not set by an override, so that the overrides are those of the first sweep.
    """
    if "resume" in config and config.resume is None:
        config.resume = "auto"
