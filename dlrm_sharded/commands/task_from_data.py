"""Builds the task of a dataset, for ranks that need not be there, and reads that of a file."""

from __future__ import annotations

import dataclasses
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.dataset import build_dataset
from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.datasets.miss_curves import num_curve_batches, with_measured_curves
from dlrm_sharded.errors import ConfigError, check_count, check_number
from dlrm_sharded.task import (
    GIB,
    MAX_BATCH_SIZE,
    MAX_BYTES,
    MAX_RANKS,
    ShardingTask,
    Topology,
    read_task,
    why_not_fused,
    with_optimizer,
)
from dlrm_sharded.training.optimizers import OptimizerConfig

BYTES_PER_GB = 1e9
OPTIMIZER_FILES = {"sgd": "sgd", "rowwise_adagrad": "adagrad", "adam": "adam"}
"""Files of conf/optimizer by the optimizer of the tables."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOfFile:
    """The task of a task.json, and the optimizer of the runs that it stands for.

    Args:
        overrides: what a run needs to have the optimizer, besides the command line's own.
        note: a sentence on where the optimizer comes from; None if file and config have the same.
    """

    task: ShardingTask
    optimizer: OptimizerConfig
    overrides: tuple[str, ...] = ()
    note: str | None = None


def task_of_file(cfg: DictConfig, *, compute_device: str | None = None) -> TaskOfFile:
    """Read `cfg.task`, whose optimizer counts unless the command line names one.

    Args:
        compute_device: what the ranks compute on; None for what the file says.

    Raises:
        ConfigError: the file does not describe a task, or its ranks cannot have the optimizer.
    """
    task = read_task(cfg.task)
    if compute_device is not None:
        topology = dataclasses.replace(task.topology, compute_device=compute_device)
        task = dataclasses.replace(task, topology=topology)
    optimizer: OptimizerConfig = instantiate(cfg.optimizer)
    known, wanted = task.known_optimizer, optimizer.embedding
    stated = {
        override.key_or_group: override.value()
        for override in command_line()
        if override.key_or_group.split(".")[0] == "optimizer"
    }
    if {"optimizer", "optimizer.embedding"} & set(stated):
        counted, note = with_optimizer(task, wanted), None
        if known != wanted:
            note = (
                f"the optimizer of the tables is {wanted}, as the command line says: it takes "
                f"{_memory_text(counted)}, and {cfg.task} counts {_memory_text(task)}"
            )
        return TaskOfFile(counted, optimizer, note=note)
    if known is None:
        note = (
            f"{cfg.task} counts {_memory_text(task)}, as no optimizer of a run does; runs have "
            f"optimizer.embedding={wanted} and need other memory; name theirs with optimizer="
        )
        return TaskOfFile(task, optimizer, note=note)
    if reason := why_not_fused(known, task.topology.compute_device):
        raise ConfigError(f"{cfg.task} counts {_memory_text(task)}, the memory of {reason}")
    if known == wanted:
        return TaskOfFile(task, optimizer)
    name = OPTIMIZER_FILES[known]
    node = OmegaConf.load(CONF_DIR / "optimizer" / f"{name}.yaml")
    for key, value in stated.items():
        OmegaConf.update(node, key.removeprefix("optimizer."), value)
    verb = "names" if task.optimizer else f"counts {_memory_text(task)}, the memory of"
    note = (
        f"{cfg.task} {verb} {known}, so that runs have optimizer={name}; name another with "
        "optimizer="
    )
    return TaskOfFile(task, instantiate(node), (f"optimizer={name}",), note)


def command_line() -> list[Any]:
    """Return Hydra's overrides of the command line."""
    texts = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    return OverridesParser.create().parse_overrides(texts)


def _memory_text(task: ShardingTask) -> str:
    topology = task.topology
    return f"{topology.bytes_per_element} B a weight and {topology.optimizer_bytes_per_row} B a row"


def task_from_data(cfg: DictConfig) -> ShardingTask:
    """Return the task of `cfg.data`, see `task_and_data`."""
    return task_and_data(cfg)[0]


def task_and_data(cfg: DictConfig) -> tuple[ShardingTask, Dataset]:
    """Return the task of `cfg.data`, whose tables have the profile measured on it, and the data.

    Raises:
        ConfigError: a value cannot be used, or the memory of a rank is not stated.
        DataError: the data cannot be read.
    """
    check_count("batch_size", cfg.batch_size, least=1, most=MAX_BATCH_SIZE)
    optimizer: OptimizerConfig = instantiate(cfg.optimizer)
    topology = stated_topology(cfg.topology, optimizer)
    if cfg.batch_size % topology.world_size:
        raise ConfigError(
            f"batch_size is {cfg.batch_size:,}; it is global and must be a multiple of the "
            f"{topology.world_size} ranks (topology.world_size)"
        )
    dataset = build_dataset(cfg)
    task = ShardingTask(dataset.tables, topology, cfg.batch_size, optimizer.embedding)
    num_batches = num_curve_batches(cfg.curve_batches, task)
    return with_measured_curves(task, dataset, num_batches), dataset


def stated_topology(node: DictConfig, optimizer: OptimizerConfig) -> Topology:
    """Return the ranks that a config states, with what the optimizer needs of their memory."""
    check_hosts(node)
    if node.memory_gib is None:
        raise ConfigError(
            "topology.memory_gib is not set; a plan from data needs the memory of a rank for "
            "tables, in GiB"
        )
    check_number("topology.memory_gib", node.memory_gib, above=True)
    check_number("topology.reserved_gib", node.reserved_gib)
    if node.reserved_gib >= node.memory_gib:
        raise ConfigError(
            f"topology.reserved_gib is {node.reserved_gib:g}, which leaves nothing of "
            f"topology.memory_gib = {node.memory_gib:g}; reserve less"
        )
    host_memory_bytes = None
    if node.host_memory_gib is not None:
        check_number("topology.host_memory_gib", node.host_memory_gib, most=MAX_BYTES / GIB)
        host_memory_bytes = int(node.host_memory_gib * GIB)
    bandwidths = {}
    for link in ("intra_host", "inter_host", "host"):
        gb_per_s = node[f"{link}_gb_per_s"]
        if gb_per_s is not None:
            check_number(f"topology.{link}_gb_per_s", gb_per_s, above=True)
            bandwidths[f"{link}_bytes_per_s"] = gb_per_s * BYTES_PER_GB
    return Topology(
        world_size=node.world_size,
        memory_bytes=int((node.memory_gib - node.reserved_gib) * GIB),
        local_world_size=node.ranks_per_host,
        bytes_per_element=optimizer.bytes_per_element,
        optimizer_bytes_per_row=optimizer.bytes_per_row,
        compute_device=node.compute_device,
        host_memory_bytes=host_memory_bytes,
        **bandwidths,
    )


def check_hosts(node: DictConfig) -> None:
    """Refuse ranks that cannot be on equal hosts, by the names that a config has for them."""
    if node.ranks_per_host is not None:
        check_count("topology.ranks_per_host", node.ranks_per_host, least=1)
    check_count("topology.world_size", node.world_size, least=1, most=MAX_RANKS)
    if node.ranks_per_host is not None and node.world_size % node.ranks_per_host:
        raise ConfigError(
            f"topology.ranks_per_host is {node.ranks_per_host}, must divide topology.world_size = "
            f"{node.world_size}"
        )
