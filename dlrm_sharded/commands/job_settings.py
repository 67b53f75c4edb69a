"""Builds the settings of a training run from its config."""

from __future__ import annotations

import dataclasses
import functools
import json

from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.dataset import build_dataset
from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.commands.own_folder import write_hydra_files
from dlrm_sharded.commands.planner import build_planner, plain
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.precision import ExchangePrecision, why_not_exchanged
from dlrm_sharded.plans.task import MAX_BATCH_SIZE, Topology
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.runs.result import OBJECTIVES
from dlrm_sharded.sharders.planning import Planner


def job_settings(cfg: DictConfig, rank: Rank) -> JobSettings:
    """Build the objects of a config.

    Raises:
        ConfigError: a value cannot be used; the message names its key.
    """
    for group in ("data", "model", "optimizer", "topology", "sharder", "trainer", "measure"):
        if cfg.get(group) is None:
            raise ConfigError(f"{group} is null; name one of conf/{group}")
    batch_size = cfg.batch_size
    check_count("batch_size", batch_size, least=1, most=MAX_BATCH_SIZE)
    check_count("seed", cfg.seed, least=0)
    if cfg.objective not in OBJECTIVES:
        raise ConfigError(f"objective is {cfg.objective!r}; known: {', '.join(OBJECTIVES)}")
    if batch_size % rank.world_size:
        raise ConfigError(
            f"batch_size is {batch_size:,}; it is global and must be a multiple of the "
            f"{rank.world_size} ranks"
        )
    optimizer: OptimizerConfig = instantiate(cfg.optimizer)
    optimizer.check_device(rank.device)
    precision = ExchangePrecision.parse(plain(cfg.exchange_precision))
    local_batch_size = batch_size // rank.world_size
    if reason := why_not_exchanged(precision, rank.device.type, local_batch_size):
        raise ConfigError(reason)
    topology: Topology = instantiate(cfg.topology)
    return JobSettings(
        dataset=build_dataset(cfg),
        topology=dataclasses.replace(
            topology,
            bytes_per_element=optimizer.bytes_per_element,
            optimizer_bytes_per_row=optimizer.bytes_per_row,
        ),
        optimizer=optimizer,
        trainer=instantiate(cfg.trainer),
        measure=instantiate(cfg.measure),
        batch_size=batch_size,
        seed=cfg.seed,
        new_model=instantiate(cfg.model),
        new_planner=functools.partial(_planner, cfg),
        journal=cfg.journal,
        resume=cfg.resume,
        init_from=cfg.init_from,
        objective=cfg.objective,
        check_memory=cfg.check_memory,
        dry_run=cfg.dry_run,
        config=json.loads(json.dumps(OmegaConf.to_container(cfg, resolve=True), default=str)),
        config_yaml=OmegaConf.to_yaml(cfg, resolve=True),
        write_config=functools.partial(write_hydra_files, cfg),
    )


def _planner(cfg: DictConfig, context: RunContext) -> Planner:
    return build_planner(
        cfg, context, diagnose=functools.partial(diagnose, alternatives=cfg.explain)
    )
