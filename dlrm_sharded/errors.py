"""What a user can mend. The message is complete: entry points print it alone and exit with 2."""


class UserError(Exception):
    """Base of all errors that say what happened, with the numbers, and what to do about it."""


class ConfigError(UserError, ValueError):
    """A configured value cannot be used; the message names the config key."""


def check_count(key: str, value: object, *, least: int) -> None:
    """Raise ConfigError unless a configured value is an int of `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} is {value!r}, must be an integer >= {least}")


class DataError(UserError, ValueError):
    """A data file is missing, truncated or malformed."""


class DivergenceError(UserError, ArithmeticError):
    """The loss stopped being a finite number."""


class ShardingError(UserError):
    """Base of what can go wrong between a task and its plan."""


class InfeasibleTaskError(ShardingError):
    """No plan was found that fits the memory of the ranks."""


class InvalidPlanError(ShardingError):
    """A plan does not tile its tables, does not fit its ranks, or cannot be trained by TorchRec."""
