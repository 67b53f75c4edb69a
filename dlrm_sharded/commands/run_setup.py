"""The objects that the config of a training run describes."""

from __future__ import annotations

import dataclasses

import torch
from omegaconf import DictConfig

from dlrm_sharded.calibration.measure import MeasureConfig
from dlrm_sharded.commands.dataset import build_dataset
from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.commands.planner import plain
from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.precision import ExchangePrecision, why_not_exchanged
from dlrm_sharded.plans.task import MAX_BATCH_SIZE, ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.runs.result import OBJECTIVES
from dlrm_sharded.training.trainer import TrainerConfig


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """The objects that a run's config describes, except the model and the planner."""

    dataset: Dataset
    topology: Topology
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    measure: MeasureConfig
    batch_size: int
    seed: int
    objective: str

    def task(self, topology: Topology) -> ShardingTask:
        """Return what the run plans, on ranks whose memory is known."""
        return ShardingTask(
            self.dataset.tables, topology, self.batch_size, self.optimizer.embedding
        )


def build_setup(cfg: DictConfig, rank: Rank) -> RunSetup:
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
    return RunSetup(
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
        objective=cfg.objective,
    )


def build_model(cfg: DictConfig, setup: RunSetup, task: ShardingTask, device: torch.device) -> Dlrm:
    """Build the model on a device, with the tables' optimizer, before it is sharded."""
    torch.manual_seed(setup.seed)
    model: Dlrm = instantiate(cfg.model)(task.tables, setup.dataset.num_dense, device=device)
    setup.optimizer.fuse_into(model)
    return model
