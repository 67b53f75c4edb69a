"""Overrides are tried here, before a job waits in a queue for them."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dlrm_sharded.commands.hydra_app import CONF_DIR
from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.errors import ConfigError


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError, with the keys or options that there are, for what does not compose."""
    for override in overrides:
        if override.startswith("-"):
            raise ConfigError(
                f"{override!r} is no Hydra override, and no option that "
                "`torchx run launch/component.py:train --help` lists; options come before overrides"
            )
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable_message(error)) from None
