"""Runs a batch of a Hydra sweep as TorchX apps, from its checks to what Hydra's sweeper gets."""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from torchx.runner import get_runner

from dlrm_sharded.files.errors import ConfigError, IncompleteSweepError
from dlrm_sharded.ranks.process import kept_signals
from dlrm_sharded.runs.owner import claim
from dlrm_torchx.compose import prepare
from dlrm_torchx.jobs import JobState, SweepJob
from dlrm_torchx.options import SweepOptions
from dlrm_torchx.round_sweep import RoundSweep
from dlrm_torchx.signals import STOPPING_SIGNALS, delayed_signals, raise_on_signals
from dlrm_torchx.sweep import Sweep, short_path
from dlrm_torchx.take_up import check_same_sweep, recorded_jobs


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


def returns(jobs: Sequence[SweepJob], sweep_dir: Path) -> list[JobReturn]:
    """Return what Hydra's sweeper expects; the value of a job that did not succeed raises."""
    failed = [job for job in jobs if job.state not in (JobState.SUCCEEDED, JobState.SKIPPED)]
    lines = [f"{len(failed)} of {len(jobs)} jobs did not succeed; sweep in {short_path(sweep_dir)}"]
    for job in failed:
        where = ""
        if job.handle is not None:
            log_name = f"torchx log {job.handle}" if job.log is None else short_path(job.log)
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
