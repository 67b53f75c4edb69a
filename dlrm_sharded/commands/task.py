"""The task of a config: of a file or of data, with the optimizer of the runs that it stands for.

The task of a file needs no torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.hydra_app import check_overrides, command_line, instantiate
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.plans.table_optimizers import STATE_BYTES, memory_of, why_not_fused
from dlrm_sharded.plans.task import (
    GIB,
    MAX_BATCH_SIZE,
    MAX_RANKS,
    ShardingTask,
    Topology,
    read_task,
    with_optimizer,
)

if TYPE_CHECKING:
    from dlrm_sharded.datasets.base import Dataset

log = logging.getLogger(__name__)

HERE = "here"
BYTES_PER_GB = 1e9
KEYS_OF_DATA = ("topology", "batch_size", "task_out")
"""Keys that say of data what a task.json says itself."""

LINKS = ("intra_host_gb_per_s", "inter_host_gb_per_s")
USED = {
    "optimizer": ("embedding",),
    "topology": (
        *("world_size", "ranks_per_host", "compute_device", "memory_gib", "reserved_gib"),
        *LINKS,
    ),
}
"""Keys of groups that plans depend on; a training has others, too."""


def asked_task(cfg: DictConfig) -> tuple[ShardingTask, Dataset | None]:
    """Return the task of `cfg.task`, or that of `cfg.data` with the dataset.

    Raises:
        ConfigError: a value cannot be used, or an override has no effect.
        DataError: the data cannot be read.
    """
    if (cfg.task is None) == (cfg.get("data") is None):
        raise ConfigError(
            "name either task=task.json or data=, one of conf/data, and not both, to plan from"
        )
    check_overrides(USED, _unused(cfg))
    if cfg.task is None:
        return _task_of_data(cfg)
    task = _task_of_file(cfg)
    check_batch_size(task.batch_size, task.topology.world_size, key=f"batch_size in {cfg.task}")
    return task, None


def unused_of_costs(cfg: DictConfig) -> dict[str, str]:
    """Return the keys of costs that have no effect where this machine is not planned for."""
    if cfg.get("cost_model") is None:
        reason = "cost_model is none, so nothing is predicted"
    elif cfg.hardware != HERE:
        reason = "what is measured on this machine changes the costs of hardware=here alone"
    else:
        return {}
    wanted = {"journal": cfg.journal != "none", "calibrate": cfg.get("calibrate") != "never"}
    return {key: reason for key, is_wanted in wanted.items() if is_wanted}


def _unused(cfg: DictConfig) -> dict[str, str]:
    """Return the keys that have no effect on a plan, and why."""
    reasons = unused_of_costs(cfg)
    if cfg.task is not None:
        says = f"the task is that of {cfg.task}; change it there, or name data= in its place"
        reasons |= dict.fromkeys(KEYS_OF_DATA, says)
    if not _draws(cfg):
        reasons["seed"] = "the sharder draws nothing"
    return reasons


def _draws(cfg: DictConfig) -> bool:
    """Return whether the seed has an effect on a plan, or on that of another job of the sweep."""
    drawing = OmegaConf.to_yaml(cfg.sharder), OmegaConf.to_yaml(cfg.get("data") or {})
    return any("${seed}" in text for text in drawing) or HydraConfig.get().mode is RunMode.MULTIRUN


def check_batch_size(batch_size: Any, num_ranks: int, *, key: str = "batch_size") -> None:
    """Refuse a global batch that the ranks cannot share equally."""
    check_count(key, batch_size, least=1, most=MAX_BATCH_SIZE)
    if batch_size % num_ranks:
        raise ConfigError(
            f"{key} is {batch_size:,}; it is global and must be a multiple of the {num_ranks} ranks"
        )


def build_dataset(cfg: DictConfig) -> Dataset:
    """Build the dataset that `cfg.data` describes, with the global batch size of the run.

    Raises:
        ConfigError: the dataset has another batch size than the run, whose plan, predicted cost
            and throughput would then be those of other batches.
    """
    stated = cfg.data.get("batch_size")
    if stated is not None:
        _check_equal("data.batch_size", stated, cfg.batch_size)
    data = {key: cfg.data[key] for key in cfg.data if key != "bounds"}  # which is the run's
    dataset: Dataset = instantiate(data, batch_size=cfg.batch_size)
    found = getattr(dataset, "batch_size", "not there")
    _check_equal(f"the batch_size of {type(dataset).__name__}", found, cfg.batch_size)
    return dataset


def _check_equal(name: str, found: Any, batch_size: int) -> None:
    if found != batch_size:
        raise ConfigError(
            f"{name} is {found}, but batch_size is {batch_size:,}: batches, plan and throughput "
            "must be of one size; set batch_size alone, which the dataset is built with"
        )


def _task_of_data(cfg: DictConfig) -> tuple[ShardingTask, Dataset]:
    """Return the task of the data, whose tables have the profile measured on it."""
    check_count("batch_size", cfg.batch_size, least=1, most=MAX_BATCH_SIZE)
    embedding = instantiate(cfg.optimizer).embedding
    topology = stated_topology(cfg.topology, memory_of(embedding))
    check_batch_size(cfg.batch_size, topology.world_size)
    dataset = build_dataset(cfg)
    return ShardingTask(dataset.tables, topology, cfg.batch_size, embedding), dataset


def _task_of_file(cfg: DictConfig) -> ShardingTask:
    """Read `cfg.task`, whose optimizer counts unless the command line names one, and log which.

    Raises:
        ConfigError: the file does not describe a task, or its ranks cannot have the optimizer.
    """
    task, wanted = read_task(cfg.task), cfg.optimizer.embedding
    if wanted not in STATE_BYTES:
        raise ConfigError(f"optimizer.embedding is {wanted!r}; known: {', '.join(STATE_BYTES)}")
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


def stated_topology(node: DictConfig, memory: tuple[int, int]) -> Topology:
    """Return the ranks that a config states.

    Args:
        memory: of a weight with its optimizer state, and of the state of a row, in bytes.
    """
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
    bandwidths = {}
    for link in ("intra_host", "inter_host"):
        gb_per_s = node[f"{link}_gb_per_s"]
        if gb_per_s is not None:
            check_number(f"topology.{link}_gb_per_s", gb_per_s, above=True)
            bandwidths[f"{link}_bytes_per_s"] = gb_per_s * BYTES_PER_GB
    return Topology(
        world_size=node.world_size,
        memory_bytes=int((node.memory_gib - node.reserved_gib) * GIB),
        local_world_size=node.ranks_per_host,
        bytes_per_element=memory[0],
        optimizer_bytes_per_row=memory[1],
        compute_device=node.compute_device,
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
