"""Runs a batch of a Hydra sweep as TorchX apps, from its checks to the results for Hydra."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from torchx.runner import get_runner

from dlrm_sharded.files.errors import ConfigError, IncompleteSweepError
from dlrm_sharded.files.text_table import quantity
from dlrm_sharded.ranks.process import kept_signals
from dlrm_sharded.runs.owner import claim
from dlrm_torchx.compose import prepare
from dlrm_torchx.jobs import RECORD, JobState, SweepJob, recorded_jobs
from dlrm_torchx.options import SweepOptions
from dlrm_torchx.signals import STOPPING_SIGNALS, delayed_signals, raise_on_signals
from dlrm_torchx.sweep import Sweep, short_path

log = logging.getLogger(__name__)


def launch(
    options: SweepOptions,
    job_overrides: Sequence[Sequence[str]],
    first_num: int,
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
) -> list[JobReturn]:
    """Run a batch of jobs to the end, and return their results.

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
    records, earlier = [], []
    if first_num:  # a sweeper that works in batches
        earlier = [job for job in recorded_jobs(sweep_dir) if job["num"] < first_num]
    elif options.after is not None:
        claim(sweep_dir, key="hydra.sweep.dir")
        if records := recorded_jobs(sweep_dir):
            check_same_sweep(jobs, records, sweep_dir)
    # TorchX's local scheduler sets its own handlers when it is created.
    with kept_signals(STOPPING_SIGNALS) as before, get_runner() as runner:
        sweep = Sweep(options, jobs, earlier, sweep_dir, runner)
        raise_on_signals(before)
        if records:
            sweep.take_up(records)
        try:
            sweep.run(hydra_context, task_function)
        finally:
            with delayed_signals():
                sweep.stop()
            sweep.report()
            is_stopped = isinstance(sys.exception(), KeyboardInterrupt | SystemExit)
            if is_stopped and options.after is not None and not first_num:
                how = "to continue the sweep, repeat its command with hydra.sweep.dir=%s"
                log.warning(how, short_path(sweep_dir))
    return returns(jobs, sweep_dir)


def check_one_batch(config: DictConfig) -> None:
    """Raise ConfigError if the sweeper works in batches, which share neither hosts nor time."""
    sweeper = config.hydra.sweeper
    if not str(sweeper._target_).endswith("BasicSweeper") or sweeper.max_batch_size is not None:
        raise ConfigError(
            "hydra.launcher.rounds measures all combinations in turns, and this sweeper "
            "works in batches; use hydra/sweeper=basic without hydra.sweeper.max_batch_size"
        )


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


def check_same_sweep(
    jobs: Sequence[SweepJob], records: Sequence[dict[str, Any]], sweep_dir: Path
) -> None:
    """Raise ConfigError unless the sweep in the folder had exactly these jobs."""
    here = [job.overrides for job in jobs]
    there = [record["overrides"] for record in records]
    if here != there:
        raise ConfigError(
            f"{sweep_dir} holds a sweep already, with its comparison; give another "
            f"hydra.sweep.dir, or the overrides of that sweep to take it up: {RECORD} has those of "
            f"its {quantity(len(there), 'job')}"
        )


def returns(jobs: Sequence[SweepJob], sweep_dir: Path) -> list[JobReturn]:
    """Return the results for Hydra's sweeper; reading the value of a failed job raises."""
    failed = [job for job in jobs if job.state is not JobState.SUCCEEDED]
    of_all = f"{len(failed)} of {quantity(len(jobs), 'job')}"
    lines = [f"{of_all} did not succeed; sweep in {short_path(sweep_dir)}"]
    for job in failed:
        where = ""
        if job.handle is not None:
            log_name = f"torchx log {job.handle}" if job.log is None else short_path(job.log)
            where = f"\n    log: {log_name}"
        reason = "" if job.reason is None else f": {job.reason}"
        lines.append(f"  {job.title}: {job.state}{reason}{where}")
    error = IncompleteSweepError("\n".join(lines))
    return [
        job.returned
        or JobReturn(job.overrides, job.config, status=JobStatus.FAILED, _return_value=error)
        for job in jobs
    ]
