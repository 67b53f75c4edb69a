"""Puts the tasks of a comparison on the topologies of `topologies=[h100_80gb,...] ranks=[8,64]`.

A topology in conf/topology names its GPU and the number of GPUs per host, which gives the hosts for
any number of ranks. Tables, optimizer and global batch are those of the task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from dlrm_sharded.commands.asked_task import check_batch_size
from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.commands.sharders import plain, with_overrides
from dlrm_sharded.commands.words import checked_names
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.hardware.gpus.gpu_specs import named_gpu_spec
from dlrm_sharded.plans.task import GIB, MAX_RANKS, OPTIMIZER_KEYS, ShardingTask
from dlrm_sharded.plans.topology_settings import TopologySettings


@dataclass(frozen=True, slots=True)
class ComparedTask:
    """A task of a comparison.

    Args:
        kind: group of the task in the report; "" for none.
        hardware: hardware of its ranks, see `run_context`.
        topology: name of the topology on which the task was put; "" for its own.
    """

    name: str
    task: ShardingTask
    kind: str
    hardware: str | None
    topology: str = ""


def on_topologies(cfg: DictConfig, tasks: Sequence[ComparedTask]) -> list[ComparedTask]:
    """Return each task on each topology with each number of ranks that the config names.

    Without topologies, tasks are unchanged. Without numbers of ranks, each keeps its own.

    Raises:
        ConfigError: a topology names no GPU, or ranks do not fill its hosts or cannot share the
            batch equally.
    """
    if cfg.topologies is None:
        return list(tasks)
    names = checked_names("topologies", plain(cfg.topologies), example="[h100_80gb]")
    given = [] if cfg.ranks is None else plain(cfg.ranks)
    sizes = given if isinstance(given, list) else [given]
    for size in sizes:
        check_count("ranks", size, least=1, most=MAX_RANKS)
    settings: dict[str, TopologySettings] = {
        name: instantiate(with_overrides(f"+topology={name}").topology) for name in names
    }
    return [
        _on(one, name, of_name, num_ranks)
        for one in tasks
        for name, of_name in settings.items()
        for num_ranks in sizes or [one.task.topology.world_size]
    ]


def _on(one: ComparedTask, name: str, settings: TopologySettings, num_ranks: int) -> ComparedTask:
    """Put a task on `num_ranks` ranks of a topology; its optimizer state stays."""
    if settings.hardware is None:
        raise ConfigError(f"topology {name} names no hardware, such as h100_sxm; use one that does")
    spec = named_gpu_spec(settings.hardware, key=f"hardware of topology {name}")
    assert spec.memory_gib is not None, "all GPUs with a name have one"
    per_host = settings.gpus_per_host or spec.gpus_of_domain
    check_count(f"gpus_per_host of topology {name}", per_host, least=1)
    check_batch_size(one.task.batch_size, num_ranks, key=f"batch_size of {one.name}")
    ranks = dataclasses.replace(
        settings,
        world_size=num_ranks,
        ranks_per_host=min(num_ranks, per_host),
        compute_device="cuda",
    )
    of_optimizer = (*OPTIMIZER_KEYS, "optimizer_bytes_by_table")
    state = {key: getattr(one.task.topology, key) for key in of_optimizer}
    topology = ranks.topology(spec.memory_gib * GIB, **state)
    size = f"{num_ranks} rank{'s' * (num_ranks > 1)} of {name}"
    return ComparedTask(
        f"{one.name}-{name}-{num_ranks}",
        dataclasses.replace(one.task, topology=topology),
        f"{one.kind}, {size}" if one.kind else size,
        settings.hardware,
        name,
    )
