"""Several sharders in one command: `sharder=a,b` without Hydra's multirun."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dlrm_sharded.files.errors import ConfigError

KEY = "sharder"
SEPARATOR = ";"
"""Character between a sharder's name and its settings: neuroshard;replicate=never."""


def with_sharder_list(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which `sharder=a,b` is the list `sharders` of the config.

    Raises:
        ConfigError: the line asks for multirun, names sharders twice, or sets a key of a sharder
            that it does not name.
    """
    found, others = [], []
    for argument in arguments:
        if argument in ("-m", "--multirun"):
            raise ConfigError("leave -m out: one simulation has several sharders, sharder=a,b")
        if argument.startswith(f"{KEY}="):
            found.append(argument.removeprefix(f"{KEY}="))
        elif argument.lstrip("+~").startswith(f"{KEY}."):
            setting = argument.lstrip("+~").removeprefix(f"{KEY}.")
            raise ConfigError(
                f"{argument} does not say which sharder it is for; write it behind its name: "
                f"'{KEY}=neuroshard{SEPARATOR}{setting}'"
            )
        else:
            others.append(argument)
    if len(found) > 1:
        raise ConfigError(f"sharder is there {len(found)} times; name all in one: sharder=a,b")
    if not found:
        return others
    names = split_list(found[0])
    if not names:
        raise ConfigError(f"sharder is {found[0]!r}, names no sharder")
    quoted = ",".join("'{}'".format(name.replace("'", "\\'")) for name in names)
    return [*others, f"sharders=[{quoted}]"]


def split_list(text: str) -> list[str]:
    """Return the parts of `a,b` or `[a,b]`; commas within brackets do not separate."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    stripped = (part.strip().strip("'\"") for part in parts)
    return [part for part in stripped if part]


def checked_sharders(names: object) -> list[str]:
    """Return the config's list of sharders; ConfigError if it is none, or has one twice."""
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"sharders is {names!r}, must be a list of names, such as sharder=dim")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"sharder names {twice!r} twice; name each sharder once")
    return names


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
