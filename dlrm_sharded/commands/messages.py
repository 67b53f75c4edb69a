"""Turns errors that users can fix into the one message that a command shows."""

from __future__ import annotations

from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from dlrm_sharded.errors import RankError, UserError


def readable_message(error: BaseException) -> str | None:
    """Return the message for the user, or None for an error that only a programmer can fix."""
    cause = error.__cause__
    if isinstance(cause, RankError):
        cause = cause.__cause__
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, InstantiationException):
        if isinstance(cause, UserError):
            return str(cause)
        if not isinstance(cause, TypeError | ImportError | ValueError | None):
            return None
    if isinstance(error, MissingMandatoryValue) and error.full_key:
        return f"{error.full_key} is not set"
    if isinstance(error, HydraException | OmegaConfBaseException):
        details = "" if cause is None or str(cause) in str(error) else f"\n{cause}"
        return f"{error}{details}{_known_keys(cause)}"
    return None


def _known_keys(error: BaseException | None) -> str:
    """Return a line that lists the keys of a config, after an error about an unknown one."""
    parent = getattr(error, "parent_node", None)
    if not isinstance(error, ConfigKeyError | ConfigAttributeError) or not parent:
        return ""
    names = sorted(str(key) for key in parent if not str(key).startswith("_"))
    return f"\nknown there: {', '.join(names)}"
