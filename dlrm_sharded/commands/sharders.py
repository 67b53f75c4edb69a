"""Builds the sharders that a command names, and their planners."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from dlrm_sharded.calibration.hardware_costs import budget_in_s
from dlrm_sharded.commands.asked_task import HERE
from dlrm_sharded.commands.hydra_app import command_line, instantiate
from dlrm_sharded.commands.yamls import option_node, options_of
from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.explain.profile_value import value_profiles
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.artifact import CALIBRATED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import named_gpu_spec
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.process import threads_of_a_rank
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.planning import Diagnose, Planner, PlannerFactory

KEY, LIST = "sharder", "sharders"
SEPARATOR = ";"
"""Character between a sharder's name and its settings: search;replicate=never."""


def planner_factory(cfg: DictConfig, *, diagnose: Diagnose | None = None) -> PlannerFactory:
    """Build the planner factory of a config, from its sharder, cost model and exchange precision.

    Nodes with `_partial_: true` are called later: the cost model with the run's context, a sharder
    with a `SharderContext`, which also has the cost model.

    Raises:
        ConfigError: a value cannot be used.
    """
    node = drop_keys_of_replaced_class(cfg, KEY)
    return PlannerFactory(
        sharder=instantiate(node),
        cost_model=instantiate(drop_keys_of_replaced_class(cfg, "cost_model")),
        diagnose=diagnose,
        value_profiles=value_profiles,
        exchange_precision=asked_precision(cfg),
        options=OmegaConf.to_container(node, resolve=True),  # type: ignore[arg-type]
    )


def start_budget(cfg: DictConfig) -> float | None:
    """Return the time for a config's first measurement, in s; None for no measurement.

    A cost model from a file that the config names needs none.

    Raises:
        ConfigError: the value of `calibrate` cannot be used.
    """
    budget_s = budget_in_s(cfg.calibrate)
    model = cfg.get("cost_model")
    if model is None or "journal" not in model or model.get("artifact") is not None:
        return None
    return budget_s


def make_planner(
    name: str,
    cost_model: CostModel | None = None,
    *,
    run: RunContext | None = None,
    seed: int = 0,
    diagnose: Diagnose | None = None,
    **options: Any,
) -> Planner:
    """Build a sharder by name, as `sharder=NAME` does, and return its planner.

    Args:
        name: name of a yaml in conf/sharder.
        cost_model: the cost model for search, if the sharder searches, and for predictions in
            reports.
        run: the hardware of the ranks; None for any device.
        options: keys of the sharder's yaml, such as `replicate="never"`.

    Raises:
        ConfigError: there is no such sharder, or it has no such option.
    """
    names = options_of("sharder")
    if name not in names:
        raise ConfigError(f"there is no sharder {name!r}; known: {', '.join(names)}")
    node = option_node("sharder", name)
    if unknown := sorted(options.keys() - {str(key) for key in node}):
        known = ", ".join(sorted(str(key) for key in node if not str(key).startswith("_")))
        raise ConfigError(f"sharder {name} has no option {unknown[0]!r}; known: {known}")
    root = OmegaConf.create({"seed": seed, KEY: OmegaConf.merge(node, options)})
    factory = dataclasses.replace(planner_factory(root, diagnose=diagnose), cost_model=cost_model)
    return factory.planner(run or RunContext())


def make_sharder(name: str, cost_model: CostModel | None = None, **options: Any) -> Sharder:
    """Build a sharder by name, as `make_planner` does: `make_sharder("torchrec")`.

    Args:
        options: `run` and `seed` of `make_planner`, and keys of the sharder's yaml.

    Raises:
        ConfigError: there is no such sharder, or it has no such option.
    """
    return make_planner(name, cost_model, **options).sharder


def asked_precision(cfg: DictConfig) -> ExchangePrecision:
    """Return the precision of exchanges; raise ConfigError if it is unknown."""
    return ExchangePrecision.parse(plain(cfg.get("exchange_precision", "fp32")))


def plain(value: Any) -> Any:
    """Return a config value without OmegaConf's types."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def drop_keys_of_replaced_class(cfg: DictConfig, group: str) -> Any:
    """Return a group's node without the keys of a class that the command line replaced.

    `sharder._target_=my.module.MySharder` names another class, to which only the arguments on the
    command line belong, and not those in the chosen yaml.
    """
    node = cfg.get(group)
    paths = [override.key_or_group.split(".") for override in command_line()]
    if [group, "_target_"] not in paths:
        return node
    kept = {path[1] for path in paths if path[0] == group and path[1:]}
    node = node.copy()  # keeps its parent, for values such as ${seed}
    with open_dict(node):
        for key in set(node) - kept:
            del node[key]
    return node


def run_context(hardware: str | None, task: ShardingTask, optimizer: str | None) -> RunContext:
    """Return the hardware of a task's ranks: any device, a named GPU, or this machine.

    Raises:
        ConfigError: the hardware is unknown, or the task is for other devices.
    """
    topology = task.topology
    if hardware is None:
        return RunContext(device=topology.compute_device, calibrated=CALIBRATED)
    if hardware == HERE:
        return _context_here(topology, optimizer)
    spec = named_gpu_spec(hardware, key="hardware")
    if topology.compute_device != "cuda":
        raise ConfigError(
            f"hardware is {hardware!r}, a GPU, and the task is for CPUs; set hardware to {HERE}, "
            "or topology.compute_device to cuda in task.json"
        )
    spec.check_memory(max(topology.rank_memory_bytes) / GIB)
    if topology.local_world_size is None and topology.world_size > spec.gpus_of_domain:
        raise ConfigError(
            f"the {topology.world_size} ranks are on one host, as none is stated, and a host of "
            f"{spec.key} connects {spec.gpus_of_domain}; set topology.ranks_per_host, in task.json "
            "topology.local_world_size"
        )
    named = Hardware(spec.device_name)
    return RunContext("cuda", named, optimizer, topology.ranks_per_host, calibrated=CALIBRATED)


def _context_here(topology: Topology, optimizer: str | None) -> RunContext:
    """Return the context of ranks on this machine, with the same number of threads as in a run."""
    device = topology.compute_device
    if device == "cuda" and device_type() != "cuda":
        raise ConfigError(
            "hardware is here, the task is for GPUs, and this machine has none; name their kind, "
            "or set topology.compute_device to cpu in task.json"
        )
    import torch

    from dlrm_sharded.hardware.detect import local_context

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of_a_rank(topology.ranks_per_host))
    return local_context(torch.device(device), optimizer, topology.ranks_per_host)


def quoted_list(argument: str) -> str:
    """Quote the names in `sharders=[a;key=1,b]` on a command line, because Hydra rejects `;`."""
    if not argument.startswith(f"{LIST}="):
        return argument
    value = argument.removeprefix(f"{LIST}=").replace("'", "\\'")
    return f"{LIST}='{value}'"


def config_of_sharder(sharder: str) -> DictConfig:
    """Compose the running command's config with a sharder and its settings.

    Raises:
        ConfigError: a setting is not of the form key=value.
        Hydra's errors: there is no such sharder, or it has no such setting.
    """
    name, *settings = (part.strip() for part in sharder.split(SEPARATOR))
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(
                f"sharder {sharder!r} has the setting {setting!r}; it must be key=value"
            )
    return with_overrides(f"+{KEY}={name}", *(f"{KEY}.{setting}" for setting in settings))


def with_overrides(*overrides: str) -> DictConfig:
    """Compose the running command's config with further overrides; Hydra's errors pass."""
    running = HydraConfig.get()
    return compose(running.job.config_name, [*running.overrides.task, *overrides])
