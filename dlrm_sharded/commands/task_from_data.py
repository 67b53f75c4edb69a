"""Builds the task of a dataset, for ranks that need not be there."""

from __future__ import annotations

from omegaconf import DictConfig

from dlrm_sharded.commands.dataset import build_dataset
from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.datasets.base import Dataset
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.host_memory.miss_curves import num_curve_batches, with_measured_curves
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.task import (
    GIB,
    MAX_BATCH_SIZE,
    MAX_BYTES,
    MAX_RANKS,
    ShardingTask,
    Topology,
)

BYTES_PER_GB = 1e9


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
