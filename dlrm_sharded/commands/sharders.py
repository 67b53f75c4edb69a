"""The sharders that a command names, and their planners: a sharder, a cost model and a context."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from dlrm_sharded.calibration.hardware_costs import budget_in_s
from dlrm_sharded.commands.hydra_app import command_line, instantiate, run_hydra
from dlrm_sharded.commands.removed import why_key_of_search, why_removed
from dlrm_sharded.commands.task import HERE
from dlrm_sharded.commands.words import split_list
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
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.planning import Diagnose, Planner

KEY, LIST = "sharder", "sharders"
SEPARATOR = ";"
"""Character between a sharder's name and its settings: search;replicate=never."""


def build_planner(
    cfg: DictConfig,
    context: RunContext,
    *,
    diagnose: Diagnose | None = None,
    cost_model: CostModel | None = None,
) -> Planner:
    """Build the sharder and the cost model of a config.

    Nodes with `_partial_: true` are called with their context: the cost model with the run's, a
    sharder with a `SharderContext`, which has the cost model too.

    Args:
        cost_model: that of the config, if it is built already.
    """
    if cost_model is None and cfg.get("cost_model") is not None:
        cost_model = _with_context("cost_model", instantiate(cfg.cost_model), context)
        if not hasattr(cost_model, "predict"):
            raise ConfigError(
                f"cost_model._target_ makes {cost_model!r}, which has no method `predict`"
            )
    precision = asked_precision(cfg)
    sharder_context = SharderContext(context, cost_model)
    node = drop_keys_of_replaced_class(cfg.sharder)
    made = instantiate(node)
    sharder = _with_context(KEY, made, sharder_context)
    if not hasattr(sharder, "shard"):
        raise ConfigError(f"sharder._target_ makes {sharder!r}, which has no method `shard`")
    options: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    has_context = isinstance(made, functools.partial)
    return Planner(sharder, cost_model, diagnose, value_profiles, precision, options, has_context)


def start_budget(cfg: DictConfig) -> float | None:
    """Return the time in which a first run may measure for a config's cost model; None for none.

    A file that the config names has the prices that it has.

    Raises:
        ConfigError: `calibrate` cannot be used.
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
    """Build a sharder by its name, as `sharder=NAME` does, and its planner.

    Args:
        name: one of conf/sharder.
        cost_model: the prices by which it searches, for those that do, and of its reports.
        run: what the ranks compute on; None for any device.
        options: keys of the sharder's yaml, such as `replicate="never"`.

    Raises:
        ConfigError: there is no such sharder, or it has no such option.
    """
    names = options_of("sharder")
    if name not in names:
        known = f"there is no sharder {name!r}; known: {', '.join(names)}"
        raise ConfigError(why_removed(f"{KEY}={name}") or known)
    node = option_node("sharder", name)
    if unknown := sorted(options.keys() - {str(key) for key in node}):
        known = ", ".join(sorted(str(key) for key in node if not str(key).startswith("_")))
        message = f"sharder {name} has no option {unknown[0]!r}; known: {known}"
        key = f"{KEY}.{unknown[0]}"
        raise ConfigError(why_removed(key) or why_key_of_search(key) or message)
    root = OmegaConf.create({"seed": seed, KEY: OmegaConf.merge(node, options)})
    context = SharderContext(run or RunContext(), cost_model)
    made = instantiate(root[KEY])
    sharder: Sharder = _with_context(KEY, made, context)
    has_context = isinstance(made, functools.partial)
    made_of: dict[str, Any] = OmegaConf.to_container(root[KEY], resolve=True)  # type: ignore[assignment]
    return Planner(
        sharder, cost_model, diagnose, value_profiles, options=made_of, has_context=has_context
    )


def make_sharder(
    name: str,
    cost_model: CostModel | None = None,
    *,
    run: RunContext | None = None,
    seed: int = 0,
    **options: Any,
) -> Sharder:
    """Build a sharder by its name, as `make_planner` does: `make_sharder("torchrec")`.

    Raises:
        ConfigError: there is no such sharder, or it has no such option.
    """
    return make_planner(name, cost_model, run=run, seed=seed, **options).sharder


def asked_precision(cfg: DictConfig) -> ExchangePrecision:
    """Return the precision of exchanges; ConfigError if there is none like it."""
    return ExchangePrecision.parse(plain(cfg.get("exchange_precision", "fp32")))


def plain(value: Any) -> Any:
    """Return a value of a config without OmegaConf's types."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _with_context(group: str, made: Any, context: RunContext | SharderContext) -> Any:
    """Call what a node with `_partial_: true` made; leave anything else as it is."""
    if not isinstance(made, functools.partial):
        return made
    try:
        return made(context)
    except TypeError as error:  # a key that the function does not have
        raise ConfigError(f"{group}: {error}") from error


def drop_keys_of_replaced_class(sharder: DictConfig) -> DictConfig:
    """Return the sharder's node without the keys of a class that the command line replaced.

    `sharder._target_=my.module.MySharder` names another class. The arguments in the chosen yaml
    do not belong to that class, but those on the command line do.
    """
    paths = [override.key_or_group.split(".") for override in command_line()]
    if [KEY, "_target_"] not in paths:
        return sharder
    kept = {path[1] for path in paths if path[0] == KEY and path[1:]}
    node = sharder.copy()  # keeps its parent, for values such as ${seed}
    with open_dict(node):
        for key in set(sharder) - kept:
            del node[key]
    return node


def run_context(hardware: str | None, task: ShardingTask, optimizer: str | None) -> RunContext:
    """Return what the ranks of a task compute on: any device, a GPU with a name, or this machine.

    Raises:
        ConfigError: there is no such hardware, or the task is for other devices.
    """
    topology = task.topology
    if hardware is None:
        return RunContext(device=topology.compute_device, calibrated=CALIBRATED)
    if hardware == HERE:
        return context_here(topology, optimizer)
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


def context_here(topology: Topology, optimizer: str | None) -> RunContext:
    """Return ranks that compute on this machine, with as many threads as those of a run."""
    device = topology.compute_device
    if device == "cuda" and device_type() != "cuda":
        raise ConfigError(
            "hardware is here, the task is for GPUs, and this machine has none; name their kind, "
            "or set topology.compute_device to cpu in task.json"
        )
    import torch

    from dlrm_sharded.hardware.detect import local_context

    stated = os.environ.get("OMP_NUM_THREADS")
    threads = (
        threads_of_a_rank(topology.ranks_per_host) if stated is None else int(stated.split(",")[0])
    )
    torch.set_num_threads(threads)
    return local_context(torch.device(device), optimizer, topology.ranks_per_host)


def run_with_sharder_list(hydra_main: Callable[[], object]) -> None:
    """Do what `run_hydra` does, with several sharders in one run rather than in a sweep."""

    def start() -> None:
        sys.argv[1:] = with_sharder_list(sys.argv[1:])
        hydra_main()

    run_hydra(start)


def with_sharder_list(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which `sharder=a,b` or `sharders=[a,b]` is a list for Hydra.

    Raises:
        ConfigError: the line asks for multirun, names sharders twice, or sets a key of a sharder
            that it does not name.
    """
    found, others = [], []
    for argument in arguments:
        if argument in ("-m", "--multirun"):
            raise ConfigError("leave -m out: one command has several sharders, sharder=a,b")
        if argument.startswith((f"{KEY}=", f"{LIST}=")):
            found.append(argument.partition("=")[2])
        elif argument.lstrip("+~").startswith(f"{KEY}."):
            setting = argument.lstrip("+~").removeprefix(f"{KEY}.")
            raise ConfigError(
                f"{argument} does not say which sharder it is for; write it behind its name: "
                f"'{KEY}=search{SEPARATOR}{setting}'"
            )
        else:
            others.append(argument)
    if not found:
        return others
    if len(found) > 1:
        raise ConfigError(f"sharder is there {len(found)} times; name all in one: sharder=a,b")
    names = split_list(found[0])
    if not names:
        raise ConfigError(f"sharder is {found[0]!r}, names no sharder")
    quoted = ",".join("'{}'".format(name.replace("'", "\\'")) for name in names)
    return [*others, f"{LIST}=[{quoted}]"]


def config_of_sharder(config_name: str, sharder: str) -> DictConfig:
    """Compose the running command's config with a sharder and its settings.

    Raises:
        ConfigError: a setting is not of the form key=value.
        Hydra's errors: there is no such sharder, or it has no such setting.
    """
    name, *settings = (part.strip() for part in sharder.split(SEPARATOR))
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"sharder {sharder!r} has the setting {setting!r}, must be key=value")
    overrides = list(HydraConfig.get().overrides.task)
    return compose(
        config_name,
        [*overrides, f"+{KEY}={name}", *(f"{KEY}.{setting}" for setting in settings)],
    )
