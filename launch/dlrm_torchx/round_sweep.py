"""A batch of a sweep whose runs share one TorchX app, and are measured there in rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction

from dlrm_sharded.files.errors import ConfigError
from dlrm_torchx.jobs import JobState, SweepJob
from dlrm_torchx.mailbox import HydraCall, JobMailbox
from dlrm_torchx.round_order import RoundsOrder
from dlrm_torchx.signals import delayed_signals
from dlrm_torchx.sweep import Sweep, short_path
from dlrm_torchx.take_up import state_now, take_up

log = logging.getLogger(__name__)


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
            short_path(allocation.log) if allocation.log else "the scheduler's",
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
