"""Makes the jobs of a sweep from the overrides that Hydra's sweeper chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.own_folder import resolvable
from dlrm_torchx.jobs import SweepJob
from dlrm_torchx.mailbox import JobMailbox


def prepare(
    num: int,
    overrides: Sequence[str],
    hydra_context: HydraContext,
    config: DictConfig,
    sweep_dir: Path,
) -> SweepJob:
    """Compose one job's config, resolved so that it does not depend on the time or the rank."""
    job_config = hydra_context.config_loader.load_sweep_config(config, list(overrides))
    job_config.hydra.job.id = str(num)
    job_config.hydra.job.num = num
    job_config.hydra.sweep.dir = str(sweep_dir)
    if "cost_model_snapshot" in job_config and job_config.cost_model_snapshot is None:
        job_config.cost_model_snapshot = str(sweep_dir / "prices")  # shared by all jobs
    with resolvable(job_config) as copy:
        subdir = str(copy.hydra.sweep.subdir)
    job_config.hydra.sweep.subdir = subdir
    swept = swept_overrides(overrides, config)
    return SweepJob(
        num=num,
        title=" ".join([f"#{num}", *(swept or [subdir])]),
        overrides=list(OmegaConf.to_container(job_config.hydra.overrides.task)),  # type: ignore[arg-type]
        config=job_config,
        folder=sweep_dir / subdir,
        mailbox=JobMailbox(sweep_dir / ".torchx" / str(num)),
    )


def swept_overrides(overrides: Sequence[str], config: DictConfig) -> list[str]:
    """Return a job's overrides without those common to all jobs, which sweepers may respell."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    parse = OverridesParser.create().parse_overrides
    for_all = parse([*config.hydra.overrides.task, *(f"{k}={v}" for k, v in params.items())])
    constants = [(item.get_key_element(), item.value()) for item in for_all]
    return [
        text
        for text, item in zip(overrides, parse(list(overrides)), strict=True)
        if (item.get_key_element(), item.value()) not in constants
    ]
