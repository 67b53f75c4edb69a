"""The task that a config names: from a file or from data, with the optimizer of its runs.

A task from a file needs no torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from dlrm_sharded.commands.hydra_app import command_line, instantiate
from dlrm_sharded.files.errors import ConfigError, check_choice, check_count
from dlrm_sharded.plans.table_optimizers import STATE_BYTES, memory_of, why_not_fused
from dlrm_sharded.plans.task import (
    MAX_BATCH_SIZE,
    OPTIMIZER_KEYS,
    ShardingTask,
    read_task,
    with_optimizer,
)
from dlrm_sharded.plans.topology_settings import TopologySettings

if TYPE_CHECKING:
    from dlrm_sharded.datasets.base import Dataset

log = logging.getLogger(__name__)

HERE = "here"
LINKS = ("intra_host_gb_per_s", "inter_host_gb_per_s")
"""Bandwidth keys of a topology, which all commands use."""


def asked_task(cfg: DictConfig) -> tuple[ShardingTask, Dataset | None]:
    """Return the task in `cfg.task`, or the task of `cfg.data` with its dataset.

    Raises:
        ConfigError: a value cannot be used.
        DataError: the data cannot be read.
    """
    if (cfg.task is None) == (cfg.get("data") is None):
        raise ConfigError("give either task=task.json or data=NAME, one of conf/data, and not both")
    if cfg.task is None:
        return _task_of_data(cfg)
    task = _task_of_file(cfg)
    check_batch_size(task.batch_size, task.topology.world_size, key=f"batch_size in {cfg.task}")
    return task, None


def unused_of_costs(cfg: DictConfig) -> dict[str, str]:
    """Return the cost keys without effect, with the reason, if the plan is not for this machine."""
    if cfg.get("cost_model") is not None and cfg.hardware == HERE:
        return {}
    reason = "what is measured on this machine changes only the costs of a model of hardware=here"
    return dict.fromkeys(("journal", "calibrate"), reason)


def check_batch_size(batch_size: Any, num_ranks: int, *, key: str = "batch_size") -> None:
    """Raise ConfigError unless the ranks can share the global batch equally."""
    check_count(key, batch_size, least=1, most=MAX_BATCH_SIZE)
    if batch_size % num_ranks:
        raise ConfigError(
            f"{key} is {batch_size:,}; it is global and must be a multiple of the {num_ranks} ranks"
        )


def build_dataset(cfg: DictConfig) -> Dataset:
    """Build the dataset that `cfg.data` describes, with the global batch size of the run.

    `data.bounds` belongs to the run, so no dataset can have an argument with this name.

    Raises:
        ConfigError: the dataset's batch size differs from the run's, so that plan, predicted cost
            and throughput would be for other batches.
    """
    data = {key: cfg.data[key] for key in cfg.data if key != "bounds"}
    dataset: Dataset = instantiate(data, batch_size=cfg.batch_size)
    found = {data.get("batch_size", cfg.batch_size), getattr(dataset, "batch_size", None)}
    if others := found - {cfg.batch_size}:
        raise ConfigError(
            f"the batch size of data is {others.pop()}, but batch_size is {cfg.batch_size:,}: "
            "they must be equal; set only batch_size, which the dataset gets too"
        )
    return dataset


def _task_of_data(cfg: DictConfig) -> tuple[ShardingTask, Dataset]:
    """Return the task of the data, whose tables have profiles measured on the data."""
    embedding = instantiate(cfg.optimizer).embedding
    settings: TopologySettings = instantiate(cfg.topology)
    topology = settings.topology(**dict(zip(OPTIMIZER_KEYS, memory_of(embedding), strict=True)))
    check_batch_size(cfg.batch_size, topology.world_size)
    dataset = build_dataset(cfg)
    return ShardingTask(dataset.tables, topology, cfg.batch_size, embedding), dataset


def _task_of_file(cfg: DictConfig) -> ShardingTask:
    """Read `cfg.task`; its optimizer counts unless the command line names one. Log the optimizer.

    Raises:
        ConfigError: the file does not describe a task, or its ranks cannot run the optimizer.
    """
    task, wanted = read_task(cfg.task), cfg.optimizer.embedding
    check_choice("optimizer.embedding", wanted, STATE_BYTES)
    source = f"as {cfg.task} {'says' if task.optimizer else 'counts its memory'}"
    if {"optimizer", "optimizer.embedding"} & {one.key_or_group for one in command_line()}:
        source, task = "as the command line says", with_optimizer(task, wanted)
    topology, known = task.topology, task.known_optimizer
    memory = (
        f"{topology.bytes_per_element} B a weight and {topology.optimizer_bytes_per_row} B a row"
    )
    if known and (reason := why_not_fused(known, topology.compute_device)):
        raise ConfigError(f"the tables take {memory}, the memory of {reason}")
    log.info("the optimizer of the tables is %s, %s: %s", known or "unknown", source, memory)
    return task
