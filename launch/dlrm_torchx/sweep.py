"""A batch of a sweep: submits the apps of its jobs, waits, and reports.

Each job has its own app, or one app runs all of them, in rounds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_method
from torchx.runner import Runner
from torchx.runner.config import apply as apply_torchxconfig
from torchx.specs import AppDef, InvalidRunConfigException, parse_mounts

from dlrm_sharded.files.errors import ConfigError, IncompleteSweepError, UserError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.line_file import STAGED, deliver
from dlrm_sharded.files.text_table import quantity
from dlrm_sharded.files.user_cache import journal_folder
from dlrm_sharded.ranks.attempt import RESTARTS_VARIABLE
from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_torchx.app import RENDEZVOUS_PORTS, JobShape, torchrun_app
from dlrm_torchx.jobs import RECORD, JobState, SweepApp, SweepJob, state_of
from dlrm_torchx.mailbox import HydraCall, JobMailbox
from dlrm_torchx.options import CLUSTER_POLL_S, LOCAL_POLL_S, SweepOptions
from dlrm_torchx.round_order import PROGRESS, RoundsOrder
from dlrm_torchx.signals import delayed_signals

log = logging.getLogger(__name__)

RANKS_WITHOUT_GPUS = 2
CONTAINER_SCHEDULERS = ("kubernetes", "kubernetes_mcad", "aws_batch", "local_docker")
"""Schedulers whose containers see only mounted folders."""


@dataclass
class Sweep:
    """The jobs of one batch, from the first submission to the end of the last job.

    Args:
        earlier: records of the sweep's jobs in earlier batches.

    Raises:
        ConfigError: an option has a wrong value.
    """

    options: SweepOptions
    jobs: list[SweepJob]
    earlier: list[dict[str, Any]]
    sweep_dir: Path
    runner: Runner

    def __post_init__(self) -> None:
        self._apps: list[SweepApp] = []
        self._said: set[str] = set()
        self._first_port = random.randrange(len(RENDEZVOUS_PORTS))
        self.shape = _shape(self.options)
        self._args = _scheduler_args(self.options, self.runner)
        _check_shared(self.options, self.sweep_dir)

    def take_up(self, records: Sequence[dict[str, Any]]) -> None:
        """Continue a stopped sweep: its jobs have succeeded, still run, or have to be restarted.

        In rounds, a job has succeeded if it returned a result, however its app ended.
        """
        in_rounds = self.options.rounds is not None
        running: dict[str, JobState] = {}
        for job, record in zip(self.jobs, records, strict=True):
            handle, state = record["app"], JobState(record["state"])
            if handle is None:
                continue
            if state.is_active or in_rounds:  # the driver was killed
                state = state_of(self.runner.status(handle))
            if (in_rounds or state is JobState.SUCCEEDED) and job.mailbox.has_return():
                job.take_end()
                if job.state is not JobState.SUCCEEDED:
                    log.info("%s: %s", job.title, job.reason)
                    job.state, job.reason = JobState.NOT_STARTED, None
            elif state.is_active:
                job.state = state
            if state.is_active:
                running[handle] = state
            if job.state is JobState.NOT_STARTED:
                job.is_restart = True
                if "resume" in job.config and job.config.resume is None:
                    job.config.resume = "auto"  # overrides stay those of the first sweep
            else:
                job.handle, job.seconds = handle, record["seconds"]
                job.log = None if record["log"] is None else self.sweep_dir / record["log"]
        for handle, state in running.items():
            app = self._new_app([job for job in self.jobs if in_rounds or job.handle == handle])
            app.await_app(handle, state)
            self._apps.append(app)
            log.info("waiting for %s", handle)
        succeeded = sum(job.state is JobState.SUCCEEDED for job in self.jobs)
        active = sum(job.state.is_active for job in self.jobs)
        again = sum(job.is_restart for job in self.jobs)
        text = (
            "taking up a stopped sweep of %s: succeeded: %d, still running: %d, starting again: %d"
        )
        log.info(text, quantity(len(self.jobs), "job"), succeeded, active, again)

    def run(self, hydra_context: HydraContext, task_function: TaskFunction) -> None:
        jobs = [job for job in self.jobs if job.state is JobState.NOT_STARTED]
        for job in jobs:
            state = Singleton.get_state()
            job.mailbox.send_call(HydraCall(task_function, job.config, hydra_context, state))
        if self.options.rounds is None:
            waiting = [self._new_app([job]) for job in jobs]
        else:
            order = self._order()
            is_left = jobs or order.num_unmeasured()
            waiting = [self._new_app(self.jobs)] if is_left and not self._apps else []
        is_local = self.options.is_local
        limit = self.options.max_parallel or (1 if is_local else max(len(waiting), 1))
        poll_s = self.options.poll_s or (LOCAL_POLL_S if is_local else CLUSTER_POLL_S)
        text = "%s with j=%s on %s, at most %d at a time; sweep in %s"
        count, folder = quantity(len(waiting), "job"), short_path(self.sweep_dir)
        log.info(text, count, self.shape.j, self.options.scheduler, limit, folder)
        self._save()
        while waiting or self._active():
            while waiting and len(self._active()) < limit:
                self._submit(waiting.pop(0))
            for app in self._active():
                before = [job.state for job in app.jobs]
                active = app.active_jobs
                app.poll(self.runner)
                for job in active:
                    if not job.state.is_active:
                        self._log_end(job)
                self._log_news(app)
                if [job.state for job in app.jobs] != before:
                    self._save()
            if self._active():
                time.sleep(poll_s)
        for app in self._apps:
            is_missing = app.in_rounds and not app.mailbox.has_return()
            if is_missing and (app.reason or order.num_unmeasured()):
                left = f"the {order.num_unmeasured()} measurements left"
                how = f"repeat the command with hydra.sweep.dir={folder}"
                text = f"the rounds did not end: {app.reason}; to make {left}, {how}"
                if all(job.state is JobState.SUCCEEDED for job in self.jobs):
                    raise IncompleteSweepError(text)
                log.error("%s", text)

    def stop(self) -> None:
        """Cancel apps that still run, after an error or Ctrl-C."""
        for job in self.jobs:
            if job.state is JobState.NOT_STARTED:
                job.reason = "the sweep was stopped before"
        if active := self._active():
            log.info("cancelling %s", quantity(len(active), "job"))
            with ThreadPoolExecutor(max_workers=len(active)) as pool:
                list(pool.map(lambda app: app.cancel(self.runner), active))

    def report(self) -> None:
        """Write sweep.json, call `after` with the sweep's folder, and log its return value.

        It also delivers the jobs' measurements to the journal, so that they correct later
        predictions.
        """
        self._save()
        for job in self.jobs:
            deliver(job.folder / STAGED, journal_folder(str(job.config.get("journal") or "auto")))
        if self.options.after is not None and any(job.handle for job in self.jobs):
            try:
                message = get_method(self.options.after)(self.sweep_dir)
            except UserError as error:
                log.error("%s: %s", self.options.after, error)
            except Exception:  # an error here must not lose the jobs' results
                log.exception("%s failed", self.options.after)
            else:
                if message:
                    log.info("%s", message)

    def _active(self) -> list[SweepApp]:
        return [app for app in self._apps if app.state.is_active]

    def _new_app(self, jobs: Sequence[SweepJob]) -> SweepApp:
        """Return the app of one job, or in rounds the app of all jobs."""
        # the local scheduler never restarts an app
        retries = 0 if self.options.is_local else self.options.max_retries
        if self.options.rounds is None:
            return SweepApp(jobs, jobs[0].mailbox, retries=retries)
        mailbox = JobMailbox(self.sweep_dir / ".torchx" / "rounds")
        return SweepApp(jobs, mailbox, in_rounds=True, retries=retries)

    def _order(self) -> RoundsOrder:
        assert self.options.rounds is not None
        if any("round" not in job.config for job in self.jobs):
            raise ConfigError("hydra.launcher.rounds needs a config with the key round")
        return RoundsOrder(
            tuple(str(job.mailbox.folder) for job in self.jobs),
            tuple(str(job.folder) for job in self.jobs),
            num_rounds=self.options.rounds,
            timeout_s=max((job.config.get("timeout_s", 600.0) for job in self.jobs), default=600.0),
        )

    def _submit(self, app: SweepApp) -> None:
        first = app.jobs[0]
        if app.in_rounds:
            title, name = f"{quantity(len(app.jobs), 'run')} in rounds", "rounds"
            app.mailbox.folder.mkdir(parents=True, exist_ok=True)
            app.mailbox.remove_earlier_attempts()
            (app.mailbox.folder / PROGRESS).unlink(missing_ok=True)
            self._order().write(app.mailbox.folder)
        else:
            title, name = first.title, str(first.config.hydra.job.name)
        self._apps.append(app)
        try:
            with delayed_signals():  # a signal could otherwise leave an unknown app
                app.submit(self.runner, self.app_of(app, name), self.options.scheduler, self._args)
        except (OSError, subprocess.SubprocessError, UserError, InvalidRunConfigException) as error:
            if not any(job.handle for job in self.jobs):
                raise  # the scheduler would refuse the other jobs, too
            for job in app.jobs:
                job.fail(f"not submitted: {error}")
        where = "" if first.log is None else f", log in {short_path(first.log)}"
        log.info("%s: %s%s", title, app.handle or first.reason, where)
        self._save()

    def app_of(self, app: SweepApp, name: str) -> AppDef:
        """Return the TorchX app, with a rendezvous port that no other job of the sweep has."""
        env = {key: str(value) for key, value in (self.options.env or {}).items()}
        if not app.in_rounds and app.jobs[0].is_restart:
            env[RESTARTS_VARIABLE] = "1"
        num = app.jobs[0].num
        return torchrun_app(
            "dlrm_torchx.worker",
            [str(app.mailbox.folder)],
            self.shape,
            name=f"{name}-{num}".replace("_", "-"),
            image=self.options.image,
            env=env,
            rdzv_port=RENDEZVOUS_PORTS[(self._first_port + num) % len(RENDEZVOUS_PORTS)],
            mounts=parse_mounts(list(self.options.mounts or [])),
        )

    def _log_news(self, app: SweepApp) -> None:
        """Log why apps wait in the queue, and the round that one has begun, each once."""
        path = app.mailbox.folder / PROGRESS
        news = app.waits_for
        with contextlib.suppress(OSError):  # of a shared disk, or there is none yet
            news = path.read_text()
        if news and news not in self._said:
            self._said.add(news)
            log.info("%s", news)

    def _log_end(self, job: SweepJob) -> None:
        result = "" if job.reason is None else f": {job.reason}"
        if job.returned is not None and isinstance(job.returned.return_value, int | float):
            value = job.returned.return_value
            shown = f"{value:,.6g}" if math.isfinite(value) else "unknown"
            result = f": {job.config.get('objective') or 'returned'} {shown}"
        since = "its submission" if self.options.rounds is None else "the submission of all jobs"
        log.info("%s: %s %.1f s after %s%s", job.title, job.state, job.seconds, since, result)

    def _save(self) -> None:
        jobs = [*self.earlier, *(job.to_json(self.sweep_dir) for job in self.jobs)]
        write_json(self.sweep_dir / RECORD, {"jobs": jobs})


def _shape(options: SweepOptions) -> JobShape:
    """Return the shape of every job of the sweep."""
    here = f"1x{len(visible_gpus()) or RANKS_WITHOUT_GPUS}" if options.is_local else "not set"
    try:
        keys = ("cpu", "gpu", "memMB", "max_restarts", "max_retries")
        return JobShape(options.j or here, **{key: getattr(options, key) for key in keys})
    except ConfigError as error:
        raise ConfigError(f"hydra.launcher.{error}") from None


def _scheduler_args(options: SweepOptions, runner: Runner) -> dict[str, Any]:
    """Return the scheduler's options, with defaults from .torchxconfig."""
    known = runner.scheduler_run_opts(options.scheduler)
    names = sorted(name for name, _ in known)
    args = dict(options.scheduler_args or {})
    for name in args:
        if name not in names:
            raise ConfigError(
                f"hydra.launcher.scheduler_args.{name} is not an option of {options.scheduler}; "
                f"known: {', '.join(names)}"
            )
    apply_torchxconfig(options.scheduler, args)
    try:
        known.resolve(args)
    except InvalidRunConfigException as error:
        raise ConfigError(f"hydra.launcher.scheduler_args: {error}") from None
    return args


def _check_shared(options: SweepOptions, folder: Path) -> None:
    """Raise ConfigError unless a mount shows a sweep's folder to the containers of its jobs."""
    if not options.image or options.scheduler not in CONTAINER_SCHEDULERS:
        return
    mounts = parse_mounts(list(options.mounts or []))
    if not any(folder.is_relative_to(mount.dst_path) for mount in mounts):
        raise ConfigError(
            f"no hydra.launcher.mounts has {folder} in its dst, where the containers would "
            "look for their call; mount a disk that they share with this machine under its "
            "own path, or give a hydra.sweep.dir on it"
        )


def short_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
