"""Reads the task of a file, with the optimizer of the runs that it stands for. Needs no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.task import (
    STATE_BYTES,
    ShardingTask,
    read_task,
    why_not_fused,
    with_optimizer,
)

OPTIMIZER_FILES = {"sgd": "sgd", "rowwise_adagrad": "adagrad", "adam": "adam"}
"""Files of conf/optimizer by the optimizer of the tables."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOfFile:
    """The task of a task.json, and the optimizer of the runs that it stands for.

    Args:
        optimizer: config of the optimizer, to be instantiated by whoever has torch.
        overrides: what a run needs to have the optimizer, besides the command line's own.
        note: a sentence on where the optimizer comes from; None if file and config have the same.
    """

    task: ShardingTask
    optimizer: DictConfig
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
    known, wanted = task.known_optimizer, cfg.optimizer.embedding
    if wanted not in STATE_BYTES:
        raise ConfigError(f"optimizer.embedding is {wanted!r}; known: {', '.join(STATE_BYTES)}")
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
        return TaskOfFile(counted, cfg.optimizer, note=note)
    if known is None:
        note = (
            f"{cfg.task} counts {_memory_text(task)}, as no optimizer of a run does; runs have "
            f"optimizer.embedding={wanted} and need other memory; name theirs with optimizer="
        )
        return TaskOfFile(task, cfg.optimizer, note=note)
    if reason := why_not_fused(known, task.topology.compute_device):
        raise ConfigError(f"{cfg.task} counts {_memory_text(task)}, the memory of {reason}")
    if known == wanted:
        return TaskOfFile(task, cfg.optimizer)
    name = OPTIMIZER_FILES[known]
    node = OmegaConf.load(CONF_DIR / "optimizer" / f"{name}.yaml")
    for key, value in stated.items():
        OmegaConf.update(node, key.removeprefix("optimizer."), value)
    verb = "names" if task.optimizer else f"counts {_memory_text(task)}, the memory of"
    note = (
        f"{cfg.task} {verb} {known}, so that runs have optimizer={name}; name another with "
        "optimizer="
    )
    assert isinstance(node, DictConfig)
    return TaskOfFile(task, node, (f"optimizer={name}",), note)


def command_line() -> list[Any]:
    """Return Hydra's overrides of the command line."""
    texts = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    return OverridesParser.create().parse_overrides(texts)


def _memory_text(task: ShardingTask) -> str:
    topology = task.topology
    return f"{topology.bytes_per_element} B a weight and {topology.optimizer_bytes_per_row} B a row"
