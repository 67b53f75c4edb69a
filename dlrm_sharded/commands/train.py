"""Trains once, on the ranks that were started together."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dlrm_sharded.commands.job_settings import job_settings
from dlrm_sharded.files.errors import ConfigError, check_number
from dlrm_sharded.job.run import run
from dlrm_sharded.ranks.distributed import (
    all_or_none,
    on_rank_zero,
    process_group,
    reported_by_rank_zero,
)

MAX_TIMEOUT_S = 1e8
"""Limit of the time that a rank waits for the others: three years."""


def train(cfg: DictConfig) -> float:
    """Run on all ranks together; return the entry of result.json that `objective` names."""
    try:
        check_number("timeout_s", cfg.timeout_s, least=1, most=MAX_TIMEOUT_S)
    except ConfigError as error:
        reported_by_rank_zero(error)
        raise
    with process_group(timeout_s=cfg.timeout_s) as rank:
        run_dir = on_rank_zero(lambda: Path(HydraConfig.get().runtime.output_dir))
        with all_or_none():
            settings = job_settings(cfg, rank)
        return run(settings, rank, run_dir)
