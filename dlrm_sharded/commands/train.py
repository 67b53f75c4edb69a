"""Trains one run with the settings of a config, on the ranks that were started together."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrm_sharded.commands.asked_task import LINKS, build_dataset, check_batch_size
from dlrm_sharded.commands.hydra_app import all_but, check_overrides, instantiate
from dlrm_sharded.commands.own_folder import hydra_files
from dlrm_sharded.commands.sharders import asked_precision, planner_factory, start_budget
from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.datasets.id_check import BOUNDS
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import (
    ConfigError,
    check_choice,
    check_count,
    check_flag,
    check_number,
)
from dlrm_sharded.job.measure_run import measure_round
from dlrm_sharded.job.run import run
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.job.trained_config import flat, must_match_at_start
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.precision import why_not_exchanged
from dlrm_sharded.plans.table_optimizers import memory_of
from dlrm_sharded.ranks.agreement import all_or_none, as_reported_by_rank_zero, on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, detect_topology, process_group
from dlrm_sharded.runs.result import OBJECTIVES

MAX_TIMEOUT_S = 1e8
"""Largest `timeout_s`, for which a rank waits for the others: three years."""

HANDED_ON = (
    *("batch_size", "seed", "journal", "cost_model_snapshot", "resume", "init_from"),
    *("objective", "check_memory", "dry_run"),
)
"""Keys that are passed on to the settings of a job unchanged."""

OF_A_RANK = re.compile(r"\$\{(hydra|now|started):")
"""Parts of a config that may resolve to different values on rank 0 and the other ranks."""


def train(cfg: DictConfig) -> float:
    """Run on all ranks together; return the value in result.json that `objective` names."""
    try:
        check_number("timeout_s", cfg.timeout_s, least=1, most=MAX_TIMEOUT_S)
        must_match = _must_match(cfg)
    except (ConfigError, OmegaConfBaseException) as error:
        raise as_reported_by_rank_zero(error)  # noqa: B904, it sets the cause
    with process_group(timeout_s=cfg.timeout_s, must_match=must_match) as rank:
        return run(*_job(cfg, rank))


def train_round(cfg: DictConfig, round_number: int, place: int, attempt: int) -> None:
    """Measure a finished run of a sweep again, on all its ranks together; see `job.measure_run`."""
    with process_group(timeout_s=cfg.timeout_s) as rank:
        measure_round(*_job(cfg, rank), round_number, place, attempt, num_steps=cfg.round_steps)


def _job(cfg: DictConfig, rank: Rank) -> tuple[JobSettings, Rank, Path]:
    """Return the settings of a job and its folder; a collective of all ranks."""
    run_dir = on_rank_zero(lambda: Path(HydraConfig.get().runtime.output_dir))
    with all_or_none():
        return job_settings(cfg, rank), rank, run_dir


def job_settings(cfg: DictConfig, rank: Rank) -> JobSettings:
    """Build the objects that a config describes.

    Raises:
        ConfigError: a value cannot be used; the message names its key.
    """
    for group in ("data", "model", "optimizer", "topology", "sharder", "trainer", "measure"):
        if cfg.get(group) is None:
            raise ConfigError(f"{group} is null; name one of conf/{group}")
    memory = "memory_fraction" if cfg.topology.memory_gib is None else "memory_gib"
    check_overrides(all_but(cfg, "topology", "_target_", memory, "reserved_gib", *LINKS))
    check_batch_size(cfg.batch_size, rank.world_size)
    check_count("seed", cfg.seed, least=0)
    check_count("round_steps", cfg.round_steps, least=1)
    for key in ("explain", "check_memory", "dry_run"):
        check_flag(key, cfg[key])
    check_choice("data.bounds", cfg.data.bounds, BOUNDS)
    check_choice("objective", cfg.objective, OBJECTIVES)
    optimizer: OptimizerConfig = instantiate(cfg.optimizer)
    optimizer.check_device(rank.device)
    bytes_per_element, bytes_per_row = memory_of(optimizer.embedding)
    local_batch_size = cfg.batch_size // rank.world_size
    if reason := why_not_exchanged(asked_precision(cfg), rank.device.type, local_batch_size):
        raise ConfigError(reason)
    topology = detect_topology(instantiate(cfg.topology), rank=rank)
    data = OmegaConf.to_container(cfg.data, resolve=True)
    return JobSettings(
        dataset=_dataset(json.dumps(data), cfg.batch_size),
        topology=dataclasses.replace(
            topology, bytes_per_element=bytes_per_element, optimizer_bytes_per_row=bytes_per_row
        ),
        optimizer=optimizer,
        trainer=instantiate(cfg.trainer),
        measure=instantiate(cfg.measure),
        new_model=instantiate(cfg.model),
        planner=planner_factory(
            cfg, diagnose=functools.partial(diagnose, alternatives=cfg.explain)
        ),
        start_budget_s=start_budget(cfg),
        bounds=cfg.data.bounds,
        config=_plain(cfg, resolve=True),
        config_files=hydra_files(cfg),
        **{key: cfg[key] for key in HANDED_ON},
    )


@functools.lru_cache(maxsize=1)
def _dataset(data: str, batch_size: int) -> Dataset:
    """Build the dataset of `cfg.data`, given as JSON, or return it if it was the last one built.

    The runs of a sweep in rounds share processes, and most of them share data.
    """
    return build_dataset(OmegaConf.create({"data": json.loads(data), "batch_size": batch_size}))


def _must_match(cfg: DictConfig) -> dict[str, Any]:
    """Return the values with which all ranks of the job must have been started."""
    texts = flat(_plain(cfg, resolve=False))
    config = {
        key: value
        for key, value in flat(_plain(cfg, resolve=True)).items()
        if not OF_A_RANK.search(str(texts.get(key)))
    }
    return must_match_at_start(config)


def _plain(cfg: DictConfig, *, resolve: bool) -> Any:
    """Return a config in JSON types."""
    return json.loads(json.dumps(OmegaConf.to_container(cfg, resolve=resolve), default=str))
