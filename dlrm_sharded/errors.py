"""What a user can mend. The message is complete: entry points print it alone and exit with 2."""

import math
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class UserError(Exception):
    """Base of all errors that say what happened, with the numbers, and what to do about it."""


class ConfigError(UserError, ValueError):
    """A configured value cannot be used; the message names the config key."""


class DataError(UserError, ValueError):
    """A data file is missing, truncated or malformed."""


class DivergenceError(UserError, ArithmeticError):
    """The loss stopped being a finite number."""


class IncompleteSweepError(UserError):
    """Some jobs of a sweep did not succeed; the others did, and their results stand."""


class ShardingError(UserError):
    """Base of what can go wrong between a task and its plan."""


class InfeasibleTaskError(ShardingError):
    """No plan was found that fits the memory of the ranks."""


class InvalidPlanError(ShardingError):
    """A plan does not tile its tables, does not fit its ranks, or cannot be trained by TorchRec."""


def from_other_rank(error: E) -> E:
    """The error, marked as one that another rank raised too, and reports."""
    error._from_other_rank = True  # type: ignore[attr-defined]
    return error


def is_from_other_rank(error: BaseException) -> bool:
    """Whether another rank raised the error too, and reports it."""
    return bool(getattr(error, "_from_other_rank", False))


def check_count(key: str, value: object, *, least: int, most: int = 2**62) -> None:
    """Raise ConfigError unless a configured value is an int from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limit = f">= {least}" if most == 2**62 else f"from {least:,} to {most:,}"
        raise ConfigError(f"{key} is {value!r}, must be an integer {limit}")


def check_number(
    key: str, value: object, *, least: float = 0.0, most: float = math.inf, above: bool = False
) -> None:
    """Raise ConfigError unless a configured value is a finite number in [least, most].

    Args:
        above: `least` itself is not allowed.
    """
    limit = f"{'>' if above else '>='} {least:g}" + ("" if most == math.inf else f", <= {most:g}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} is {value!r}, must be a number {limit}")
    if not (least <= value <= most and math.isfinite(value)) or (above and value == least):
        raise ConfigError(f"{key} is {value!r}, must be a number {limit}")
