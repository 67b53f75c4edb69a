"""Checks overrides before a job with them is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError, which lists the known keys or options, if the overrides do not compose."""
    for override in overrides:
        if override.startswith("-"):
            raise ConfigError(
                f"{override!r} is neither a Hydra override nor an option of the component (see "
                "`torchx run launch/component.py:train --help`); options come before overrides"
            )
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(readable_message(error)) from None
