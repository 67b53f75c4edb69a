"""The sharder and the cost model of a config."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from dlrm_sharded.errors import ConfigError
from dlrm_sharded.planning import Planner


def build_planner(
    cfg: DictConfig, *, hardware: str | None, device: str, optimizer: str | None
) -> Planner:
    """The sharder and the cost model of a config; see `learned_cost_model` for the arguments.

    The cost model first: a sharder whose yaml says `_partial_: true` is given `cost_model` and the
    arguments, those of them that its signature names and its yaml does not.
    """
    cost_model = None
    if cfg.get("cost_model") is not None:
        cost_model = instantiate(cfg.cost_model)(
            hardware=hardware, device=device, optimizer=optimizer
        )
        for method in ("predict", "predict_input_dist_ms"):
            if not hasattr(cost_model, method):
                raise ConfigError(
                    f"cost_model._target_ makes {cost_model!r}, which has no method `{method}`"
                )
    sharder = instantiate(own_keys(cfg.sharder))
    if isinstance(sharder, functools.partial):
        given = _accepted(
            sharder,
            cost_model=cost_model,
            hardware=hardware,
            device=device,
            optimizer=optimizer,
        )
        try:
            sharder = sharder(**given)
        except TypeError as error:  # a wrong key
            raise ConfigError(f"sharder: {error}") from error
    if not hasattr(sharder, "shard"):
        raise ConfigError(f"sharder._target_ makes {sharder!r}, which has no method `shard`")
    return Planner(sharder, cost_model)


def _accepted(call: functools.partial[Any], **known: Any) -> dict[str, Any]:
    """Those of the keywords that a call takes, and does not have yet."""
    parameters = inspect.signature(call.func).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: value
        for name, value in known.items()
        if (takes_all or name in parameters) and name not in call.keywords
    }


def own_keys(sharder: DictConfig) -> DictConfig:
    """The sharder's node without the keys of a class that the command line replaced.

    `sharder._target_=my.module.MySharder` names another class, to which the arguments in the
    chosen yaml do not belong; those given on the command line do.
    """
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    given = [override.lstrip("+").split("=", 1)[0].split(".") for override in overrides]
    if ["sharder", "_target_"] not in given:
        return sharder
    own = sharder.copy()  # keeps its parent, for values such as ${seed}
    with open_dict(own):
        for key in set(sharder) - {path[1] for path in given if path[0] == "sharder" and path[1:]}:
            del own[key]
    return own
