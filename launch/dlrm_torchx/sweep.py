"""Runs a batch of a Hydra sweep as TorchX apps: submits them, waits, and reports the results."""

from __future__ import annotations

import glob
import logging
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf
from torchx.runner import Runner, get_runner
from torchx.specs import InvalidRunConfigException

from dlrm_sharded.files.errors import ConfigError, IncompleteSweepError, UserError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.line_file import OUTBOX, deliver
from dlrm_sharded.ranks.process import kept_signals
from dlrm_sharded.runs.owner import claim
from dlrm_torchx.compose import prepare
from dlrm_torchx.jobs import JobState, SweepJob
from dlrm_torchx.mailbox import HydraCall, JobMailbox
from dlrm_torchx.options import SweepOptions
from dlrm_torchx.round_order import RoundsOrder
from dlrm_torchx.signals import STOPPING_SIGNALS, delayed_signals, raise_on_signals
from dlrm_torchx.take_up import RECORD, check_same_sweep, recorded_jobs, state_now, take_up

log = logging.getLogger(__name__)


def launch(
    options: SweepOptions,
    job_overrides: Sequence[Sequence[str]],
    *,
    first_num: int,
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
) -> list[JobReturn]:
    """Run a batch of jobs to the end.

    Hydra's sweepers fail when they read the value of a failed job. Here, the value of every job
    that did not succeed raises one `IncompleteSweepError` about the whole batch.
    """
    if options.rounds is not None:
        check_one_batch(config)
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    logging.getLogger("torchx").setLevel(logging.WARNING)
    sweep_dir = Path(str(config.hydra.sweep.dir)).resolve()
    sweep_dir.mkdir(parents=True, exist_ok=True)
    jobs = [
        prepare(num, overrides, hydra_context, config, sweep_dir)
        for num, overrides in enumerate(job_overrides, start=first_num)
    ]
    check_folders(jobs)
    if options.scheduler == "local_cwd":  # others may see other files
        check_data(jobs)
    records, earlier = [], []
    if first_num:  # a sweeper that works in batches
        earlier = [job for job in recorded_jobs(sweep_dir) if job["num"] < first_num]
    elif options.after is not None:
        try:
            claim(sweep_dir, key="hydra.sweep.dir")
            records = recorded_jobs(sweep_dir)
            if records:
                check_same_sweep(jobs, records, sweep_dir)
        except ConfigError:
            keep_settings(sweep_dir, restore=True)
            raise
    keep_settings(sweep_dir)
    # TorchX's local scheduler sets handlers of its own when it is created.
    with kept_signals(STOPPING_SIGNALS) as before, get_runner() as runner:
        kind = Sweep if options.rounds is None else RoundSweep
        sweep = kind(options, jobs, earlier, sweep_dir, runner)
        raise_on_signals(before)
        if records:
            sweep.take_up(records)
        try:
            sweep.run(hydra_context, task_function)
        finally:
            with delayed_signals():
                sweep.stop()
            sweep.report()
    return returns(jobs, sweep_dir)


def check_one_batch(config: DictConfig) -> None:
    """Raise ConfigError if the sweeper works in batches, which share neither hosts nor minutes."""
    sweeper = config.hydra.sweeper
    if not str(sweeper._target_).endswith("BasicSweeper") or sweeper.max_batch_size is not None:
        raise ConfigError(
            "hydra.launcher.rounds measures all combinations beside one another, and this sweeper "
            "works in batches; use hydra/sweeper=basic without hydra.sweeper.max_batch_size"
        )


def keep_settings(sweep_dir: Path, *, restore: bool = False) -> None:
    """Copy Hydra's multirun.yaml, or restore it where a refused sweep has overwritten it."""
    pair = sweep_dir / "multirun.yaml", sweep_dir / ".torchx" / "multirun.yaml"
    source, copy = reversed(pair) if restore else pair
    if source.exists():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, copy)


def check_folders(jobs: Sequence[SweepJob]) -> None:
    """Raise ConfigError if two jobs would write to the same folder."""
    in_folder: dict[Path, SweepJob] = {}
    for job in jobs:
        other = in_folder.setdefault(job.folder, job)
        if other is not job:
            raise ConfigError(
                f"{other.title} and {job.title} have the same folder {job.folder}; "
                "give a hydra.sweep.subdir that differs between jobs, such as ${hydra.job.num}"
            )


def check_data(jobs: Sequence[SweepJob]) -> None:
    """Raise ConfigError if a job's data is not there; each job would find that after its start."""
    for job in jobs:
        data = job.config.get("data") or OmegaConf.create({})
        if job.state is JobState.SKIPPED or Path(data.get("blocks_dir") or "/dev/null").is_dir():
            continue  # what was converted is read without its source
        for key in OmegaConf.missing_keys(data):
            raise ConfigError(f"{job.title}: {key} is not set")
        for key in ("path", "source.files", "source.val_files"):
            named = OmegaConf.select(data, key) or ()
            for pattern in [named] if isinstance(named, str) else named:
                if not glob.glob(pattern):  # noqa: PTH207 (absolute too)
                    raise ConfigError(f"{job.title}: data.{key} is {pattern}, matches no file")


class Sweep:
    """The jobs of one batch, from the first submission to the end of the last job."""

    def __init__(
        self,
        options: SweepOptions,
        jobs: list[SweepJob],
        earlier: list[dict[str, Any]],
        sweep_dir: Path,
        runner: Runner,
    ) -> None:
        self._options = options
        self._jobs = jobs
        self._earlier = earlier
        self._sweep_dir = sweep_dir
        self._runner = runner
        self._shape = options.shape()
        self._args = options.args_for(runner)
        options.check_shared(sweep_dir)

    def take_up(self, records: Sequence[dict[str, Any]]) -> None:
        """Find what is left of a stopped sweep, by the records of its jobs."""
        take_up(self._jobs, records, self._sweep_dir, self._runner)

    def run(self, hydra_context: HydraContext, task_function: TaskFunction) -> None:
        waiting = [job for job in self._jobs if job.state is JobState.NOT_STARTED]
        waiting.reverse()
        limit = self._options.jobs_at_a_time(len(waiting))
        log.info(
            "%d jobs of %dx%d ranks on %s, at most %d at a time; sweep in %s",
            len(waiting),
            self._shape.num_nodes,
            self._shape.ranks_per_node,
            self._options.scheduler,
            limit,
            _short(self._sweep_dir),
        )
        for job in self._jobs:
            if job.state is JobState.SKIPPED:
                log.info("%s: skipped: %s", job.title, job.reason)
        self._save()
        while waiting or self._active():
            while waiting and len(self._active()) < limit:
                self._submit(waiting.pop(), hydra_context, task_function)
            for job in self._active():
                before = job.state
                job.poll(self._runner, patience_s=self._options.patience_s)
                if not job.state.is_active:
                    self._log_end(job)
                if job.state is not before:
                    self._save()
            if self._active():
                time.sleep(self._options.seconds_between_polls())

    def stop(self) -> None:
        """Cancel the apps that still run, after an error or Ctrl-C."""
        for job in self._jobs:
            if job.state is JobState.NOT_STARTED:
                job.reason = "the sweep was stopped before"
        active = self._active()
        if not active:
            return
        log.info("cancelling %d jobs", len(active))
        with ThreadPoolExecutor(max_workers=len(active)) as pool:
            list(pool.map(lambda job: job.cancel(self._runner), active))

    def report(self) -> None:
        """Write sweep.json, call `after` with the sweep's folder, and log what it returns.

        What the jobs have measured corrects later predictions from now on.
        """
        self._save()
        for job in self._jobs:
            deliver(job.folder / OUTBOX)
        if self._options.after is not None and any(job.handle for job in self._jobs):
            try:
                message = get_method(self._options.after)(self._sweep_dir)
            except UserError as error:
                log.error("%s: %s", self._options.after, error)
            except Exception:  # an error here must not lose what the jobs returned
                log.exception("%s failed", self._options.after)
            else:
                if message:
                    log.info("%s", message)

    def _active(self) -> list[SweepJob]:
        return [job for job in self._jobs if job.state.is_active]

    def _submit(
        self, job: SweepJob, hydra_context: HydraContext, task_function: TaskFunction
    ) -> None:
        job.mailbox.send_call(
            HydraCall(task_function, job.config, hydra_context, Singleton.get_state())
        )
        app = self._options.app(
            job.config.hydra.job.name, job.num, job.mailbox.folder, is_restart=job.is_restart
        )
        try:
            with delayed_signals():  # else a signal could leave an app that nobody knows of
                job.submit(self._runner, app, self._options.scheduler, self._args)
        except (OSError, subprocess.SubprocessError, UserError, InvalidRunConfigException) as error:
            if not any(other.handle for other in self._jobs):
                raise  # the scheduler would refuse the other jobs too
            job.fail(f"not submitted: {error}")
        where = "" if job.log is None else f", log in {_short(job.log)}"
        log.info("%s: %s%s", job.title, job.handle or job.reason, where)
        self._save()

    def _log_end(self, job: SweepJob) -> None:
        result = "" if job.reason is None else f": {job.reason}"
        if job.returned is not None and isinstance(job.returned.return_value, int | float):
            result = f": {job.returned.return_value:,.6g}"
        log.info("%s: %s after %.1f s%s", job.title, job.state, job.seconds, result)

    def _save(self) -> None:
        jobs = [*self._earlier, *(job.to_json(self._sweep_dir) for job in self._jobs)]
        write_json(self._sweep_dir / RECORD, {"jobs": jobs})


class RoundSweep(Sweep):
    """A batch whose jobs all run in one app, and are measured there in rounds."""

    _allocation: SweepJob | None = None

    def take_up(self, records: Sequence[dict[str, Any]]) -> None:
        take_up(self._jobs, records, self._sweep_dir, self._runner, in_one_app=True)

    def run(self, hydra_context: HydraContext, task_function: TaskFunction) -> None:
        jobs = [job for job in self._jobs if job.state is not JobState.SKIPPED]
        for job in jobs:
            if "round" not in job.config:
                raise ConfigError("hydra.launcher.rounds needs a config with the key round")
            if job.state is JobState.NOT_STARTED:
                state = Singleton.get_state()
                job.mailbox.send_call(HydraCall(task_function, job.config, hydra_context, state))
            job.folder.mkdir(parents=True, exist_ok=True)
        order = self._order(jobs)
        allocation = self._running(jobs)
        if allocation is None:
            if all(job.mailbox.has_return() for job in jobs) and not order.num_unmeasured():
                return
            allocation = self._submit_all(jobs, order)
        while allocation.state.is_active:
            time.sleep(self._options.seconds_between_polls())
            allocation.poll(self._runner, patience_s=self._options.patience_s)
            for job in jobs:
                if job.state.is_active and job.take_end():
                    self._log_end(job)
                    self._save()
        for job in self._active():
            if not job.take_end():
                job.fail(allocation.reason or "the ranks ended before it began")
        if not allocation.mailbox.has_return():  # the state of another driver's app is a guess
            log.error(
                "the rounds did not end: %s; the same command makes the %d measurements left",
                allocation.reason,
                order.num_unmeasured(),
            )

    def stop(self) -> None:
        """Cancel the app, if it still runs."""
        allocation = self._allocation
        if allocation is not None and allocation.state.is_active:
            log.info("cancelling the job of all runs")
            allocation.cancel(self._runner)
            for job in self._active():
                job.state, job.reason = allocation.state, allocation.reason
        super().stop()

    def _order(self, jobs: Sequence[SweepJob]) -> RoundsOrder:
        assert self._options.rounds is not None
        return RoundsOrder(
            tuple(str(job.mailbox.folder) for job in jobs),
            tuple(str(job.folder) for job in jobs),
            labels=tuple(job.label for job in jobs),
            seeds=tuple(int(job.config.get("seed", 0)) for job in jobs),
            num_rounds=self._options.rounds,
            seed=0,
            until=self._options.until,
            timeout_s=max((job.config.get("timeout_s", 600.0) for job in jobs), default=600.0),
        )

    def _submit_all(self, jobs: Sequence[SweepJob], order: RoundsOrder) -> SweepJob:
        """Submit the app of all jobs, and return it."""
        allocation = self._new_allocation(jobs)
        folder = allocation.folder
        folder.mkdir(parents=True, exist_ok=True)
        allocation.mailbox.remove_earlier_attempts()
        order.write(folder)
        num = allocation.num
        app = self._options.app("rounds", num, folder, program="dlrm_torchx.round_worker")
        with delayed_signals():
            allocation.submit(self._runner, app, self._options.scheduler, self._args)
            self._allocation = allocation
        log.info(
            "%d runs, then %d rounds, in one job of %dx%d ranks on %s: %s, log in %s",
            len(jobs),
            order.num_rounds,
            self._shape.num_nodes,
            self._shape.ranks_per_node,
            self._options.scheduler,
            allocation.handle,
            _short(allocation.log) if allocation.log else "the scheduler's",
        )
        for job in jobs:
            job.handle, job.log = allocation.handle, allocation.log
            if job.state is JobState.NOT_STARTED:
                job.state, job.started_s = JobState.PENDING, allocation.started_s
        self._save()
        return allocation

    def _running(self, jobs: Sequence[SweepJob]) -> SweepJob | None:
        """Return the app of a sweep whose driver was killed, if it still runs."""
        handle = next((job.handle for job in jobs if job.handle is not None), None)
        state = JobState.NOT_STARTED if handle is None else state_now(handle, self._runner)
        if not state.is_active:
            return None
        allocation = self._new_allocation(jobs)
        allocation.handle, allocation.state = handle, state
        allocation.retries, allocation.started_s = self._options.max_retries, allocation.clock()
        log.info("waiting for the job of all runs, %s", handle)
        self._allocation = allocation
        return allocation

    def _new_allocation(self, jobs: Sequence[SweepJob]) -> SweepJob:
        """Return the app of all jobs as a job of its own."""
        folder, first = self._sweep_dir / ".torchx" / "rounds", jobs[0]
        return SweepJob(first.num, "all runs", [], first.config, folder, JobMailbox(folder))


def returns(jobs: Sequence[SweepJob], sweep_dir: Path) -> list[JobReturn]:
    """Return what Hydra's sweeper expects; the value of a job that did not succeed raises."""
    failed = [job for job in jobs if job.state not in (JobState.SUCCEEDED, JobState.SKIPPED)]
    lines = [f"{len(failed)} of {len(jobs)} jobs did not succeed; sweep in {_short(sweep_dir)}"]
    for job in failed:
        where = ""
        if job.handle is not None:
            log_name = f"torchx log {job.handle}" if job.log is None else _short(job.log)
            where = f"\n    log: {log_name}"
        reason = "" if job.reason is None else f": {job.reason}"
        lines.append(f"  {job.title}: {job.state}{reason}{where}")
    error = IncompleteSweepError("\n".join(lines))
    job_returns = []
    for job in jobs:
        job_return = job.returned
        if job_return is None:
            job_return = JobReturn(overrides=job.overrides, cfg=job.config)
            skipped = job.state is JobState.SKIPPED
            job_return.status = JobStatus.COMPLETED if skipped else JobStatus.FAILED
            job_return.return_value = None if skipped else error
        job_returns.append(job_return)
    return job_returns


def _short(path: Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
