"""Starts the commands that Hydra configures, and checks their overrides."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
import hydra.utils
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.attempt import started


def run_hydra(hydra_main: Callable[[], object], *, quiet: Sequence[str] = ()) -> None:
    """Call a function decorated by `hydra.main`, with our exit codes for config errors, too.

    Args:
        quiet: overrides for ranks above 0, which follow the user's overrides.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    quiet_libraries()
    # Like Hydra's `now`, but a restarted job finds the folder of its first attempt.
    OmegaConf.register_new_resolver("started", started, use_cache=True, replace=True)
    sys.path.append(str(Path.cwd()))  # where users keep their own sharders and datasets
    with exit_codes(all_ranks_alike=True):
        sys.argv[1:] = _arguments(sys.argv[1:], rank=os.environ.get("RANK"), quiet=quiet)
        hydra_main()


def quiet_libraries() -> None:
    """Ignore warnings of libraries that users can do nothing about."""
    # TorchRec uses what torch deprecates (ShardedTensor, a DDP argument).
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecat")
    # FBGEMM differentiates its dense lookup on CPUs without registering that with autograd.
    warnings.filterwarnings("ignore", category=UserWarning, message="fbgemm::dense_embedding")


def run_command(
    command: Callable[[DictConfig], object],
    config_name: str,
    *,
    unused: Callable[[DictConfig], Mapping[str, str]],
) -> None:
    """Run a command, given as a function of its config, with our exit codes.

    Args:
        unused: declares which keys have no effect under a config, see `check_overrides`.
    """

    @functools.wraps(command)
    def hydra_main(cfg: DictConfig) -> object:
        with exit_codes(all_ranks_alike=True):
            check_overrides(unused(cfg))
        with exit_codes():
            return command(cfg)

    composed = hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=config_name)
    run_hydra(composed(hydra_main))


def compose_training(overrides: Sequence[str]) -> None:
    """Raise Hydra's error if overrides of conf/train.yaml cannot be composed."""
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        hydra.compose("train", list(overrides))


def instantiate(node: object, **arguments: object) -> Any:
    """Build the object that a config node describes, from plain lists and dicts.

    OmegaConf's own lists cannot hold objects, such as the tables in a data yaml.
    """
    return hydra.utils.instantiate(node, _convert_="all", **arguments)


def command_line() -> list[Any]:
    """Return the parsed Hydra overrides on the command line."""
    texts = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    return OverridesParser.create().parse_overrides(texts)


def all_but(cfg: DictConfig, group: str, *used: str) -> dict[str, str]:
    """Return the keys of a group that a command does not use, each with the reason."""
    reason = f"this command uses of {group} {', '.join(used)}"
    return {f"{group}.{key}": reason for key in cfg.get(group) or {} if key not in used}


def check_overrides(unused: Mapping[str, str]) -> None:
    """Refuse overrides that cannot have an effect, and lists where one option is used.

    An override that sets nothing (null, none or never) is not refused.

    Args:
        unused: by key (which includes all keys below it), why it has no effect, and what would.

    Raises:
        ConfigError: the command line has such an override.
    """
    # several experiments can be merged
    groups = {path.name for path in CONF_DIR.iterdir() if path.is_dir()} - {"experiment"}
    for override in command_line():
        name, value = override.key_or_group, override.value()
        if name in groups and isinstance(value, list):
            raise ConfigError(
                f"{override.input_line} is a list, but this command takes one {name}; use "
                "dlrm-train -m for several, or dlrm-compare for several sharders"
            )
        for key, reason in unused.items():
            if f"{name}.".startswith(f"{key}.") and value not in (None, "none", "never"):
                raise ConfigError(f"{override.input_line} has no effect: {reason}")


def _arguments(arguments: list[str], *, rank: str | None, quiet: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra; above rank 0, `quiet` follows and so overrides the user's.

    Only rank 0 prints what flags such as --help ask for.

    Raises:
        ConfigError: the arguments are not valid for Hydra, or cannot work here.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would print on every rank
    asked = parser.parse_args(arguments)  # prints the version itself
    if asked.multirun and rank is not None:
        raise ConfigError(
            "-m starts a sweep, and under torchrun every rank would start one; leave torchrun out"
        )
    if rank in (None, "0"):
        return arguments
    if asked.help or asked.hydra_help or asked.cfg or asked.info or asked.shell_completion:
        sys.exit(0)  # rank 0 prints it
    # argparse wants all overrides together
    flags = [word for word in arguments if word not in asked.overrides]
    return [*flags, *asked.overrides, *quiet]


def _refuse(message: str) -> NoReturn:
    raise ConfigError(
        f"{message}; put flags before or after all overrides; --hydra-help lists them"
    )
