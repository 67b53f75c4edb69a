"""Builds the planner of a config: its sharder, with its cost model."""

from __future__ import annotations

import functools
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from dlrm_sharded.commands.hydra_app import instantiate
from dlrm_sharded.explain.profile_value import value_profiles
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.precision import ExchangePrecision
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.planning import Diagnose, Planner


def build_planner(
    cfg: DictConfig, context: RunContext, *, diagnose: Diagnose | None = None
) -> Planner:
    """Build the sharder and the cost model of a config.

    Nodes with `_partial_: true` are called with their context: the cost model with the run's, a
    sharder with a `SharderContext`, which has the cost model too.
    """
    cost_model = None
    if cfg.get("cost_model") is not None:
        cost_model = _with_context("cost_model", instantiate(cfg.cost_model), context)
        if not hasattr(cost_model, "predict"):
            raise ConfigError(
                f"cost_model._target_ makes {cost_model!r}, which has no method `predict`"
            )
    precision = ExchangePrecision.parse(plain(cfg.get("exchange_precision", "fp32")))
    sharder_context = SharderContext(context, cost_model, precision)
    sharder = _with_context(
        "sharder", instantiate(drop_keys_of_replaced_class(cfg.sharder)), sharder_context
    )
    if not hasattr(sharder, "shard"):
        raise ConfigError(f"sharder._target_ makes {sharder!r}, which has no method `shard`")
    return Planner(sharder, cost_model, diagnose, value_profiles, precision)


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
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    paths = [override.lstrip("+").split("=", 1)[0].split(".") for override in overrides]
    if ["sharder", "_target_"] not in paths:
        return sharder
    kept = {path[1] for path in paths if path[0] == "sharder" and path[1:]}
    node = sharder.copy()  # keeps its parent, for values such as ${seed}
    with open_dict(node):
        for key in set(sharder) - kept:
            del node[key]
    return node
