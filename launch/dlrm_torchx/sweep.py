"""The jobs of a batch of a sweep, each a TorchX app: submits them, waits, and reports."""

from __future__ import annotations

import logging
import math
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_method
from torchx.runner import Runner
from torchx.specs import InvalidRunConfigException

from dlrm_sharded.files.errors import UserError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.line_file import OUTBOX, deliver
from dlrm_sharded.files.user_cache import journal_folder
from dlrm_sharded.runs.result import why_unknown
from dlrm_torchx.jobs import JobState, SweepJob
from dlrm_torchx.mailbox import HydraCall
from dlrm_torchx.options import SweepOptions
from dlrm_torchx.signals import delayed_signals
from dlrm_torchx.take_up import RECORD, take_up

log = logging.getLogger(__name__)


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
            short_path(self._sweep_dir),
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
            journals = journal_folder(str(job.config.get("journal") or "auto"))
            deliver(job.folder / OUTBOX, journals)
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
        where = "" if job.log is None else f", log in {short_path(job.log)}"
        log.info("%s: %s%s", job.title, job.handle or job.reason, where)
        self._save()

    def _log_end(self, job: SweepJob) -> None:
        result = "" if job.reason is None else f": {job.reason}"
        if job.returned is not None and isinstance(job.returned.return_value, int | float):
            value = job.returned.return_value
            known = math.isfinite(value)
            result = f": {value:,.6g}" if known else f": {why_unknown(job.config)}"
        log.info("%s: %s after %.1f s%s", job.title, job.state, job.seconds, result)

    def _save(self) -> None:
        jobs = [*self._earlier, *(job.to_json(self._sweep_dir) for job in self._jobs)]
        write_json(self._sweep_dir / RECORD, {"jobs": jobs})


def short_path(path: Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
