"""Errors that a user can fix, and checks of configured values.

UserError                    a command prints only its message, and exits with 2 unless noted
+-- ConfigError              a configured value cannot be used
+-- DataError                a data file cannot be read
+-- DivergenceError          losses, predictions or weights are not finite
+-- CheckpointError          a checkpoint is damaged or does not fit
|   +-- DamagedCheckpointError   its files are not usable
+-- UnsavedError             the result or the last checkpoint could not be saved (exit code 1)
+-- PreemptedError           a signal stopped training, after a checkpoint (exit code 0)
+-- RemoteFileError          an object store or another remote file system refuses a request
+-- LostFolderError          another job has taken over the run's folder (exit code 1)
+-- IncompleteSweepError     jobs of a sweep failed (exit code 1)
+-- LostRankError            another rank is gone (exit code 1)
|   +-- HungRankError        another rank is alive, but does not come to a collective
+-- EndedRankError           the ranks end before they have a process group
|   +-- UnlikeRanksError     they have different configs, versions or data
+-- ShardingError            there is no usable plan
    +-- InfeasibleTaskError  no plan fits
    +-- InvalidPlanError     this plan cannot be trained
RankError                    cause of an error that ranks agreed on
"""

import math
import sys
from collections.abc import Iterable
from os import PathLike

EXIT_ERROR, EXIT_USER_ERROR, EXIT_INTERRUPTED, RANK_EXIT_PREEMPTED = 1, 2, 130, 0
"""Exit codes of commands after a bug, after an error that the user can fix, after Ctrl-C, and after
a signal that stopped training. `commands.exit_codes` ends a process with the code of its error; a
launcher exits with 2 if the first rank that failed did, and otherwise with 1."""

AGAINST_DIVERGENCE = "lower optimizer.*_learning_rate, warm up longer, or set optimizer.clip_norm"
"""End of a DivergenceError's message: what a user can do about it."""


class UserError(Exception):
    """Base of all errors whose message says what happened, with numbers, and what to do."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError, ValueError):
    """A configured value cannot be used; the message names the config key."""


class DataError(UserError, ValueError):
    """A data file is missing, truncated or malformed."""


class DivergenceError(UserError, ArithmeticError):
    """The loss, a prediction or a weight stopped being a finite number."""


class CheckpointError(UserError):
    """A checkpoint is damaged, or does not fit the model or the data."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing or changed, or hold values that are not finite."""


class UnsavedError(UserError):
    """Training ended, and its result or its last checkpoint could not be written."""

    exit_code = EXIT_ERROR


class PreemptedError(UserError):
    """A signal asked training to stop, and a checkpoint was written."""

    exit_code = RANK_EXIT_PREEMPTED


class RemoteFileError(UserError, OSError):
    """A request to a remote file system failed repeatedly."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class LostFolderError(UserError):
    """Another job has taken over the run's folder, so this one must not write there."""

    exit_code = EXIT_ERROR


class IncompleteSweepError(UserError):
    """Jobs of a sweep failed; the results of all others are kept."""

    exit_code = EXIT_ERROR


class LostRankError(UserError, RuntimeError):
    """The connection to another rank broke in a collective."""

    exit_code = EXIT_ERROR


class HungRankError(LostRankError):
    """A rank did not come to a collective in which others waited for it."""


class EndedRankError(UserError):
    """A rank ended with an error before the ranks had met; the message is that rank's."""


class UnlikeRanksError(EndedRankError):
    """Ranks of one job were started with different configs or versions, or read different data."""


class ShardingError(UserError):
    """Base of errors about a task or its plan."""


class InfeasibleTaskError(ShardingError):
    """No plan was found that fits the memory of the ranks."""


class InvalidPlanError(ShardingError):
    """A plan does not tile its tables, does not fit its ranks, or cannot be trained by TorchRec."""


class RankError(Exception):
    """The cause of an error that ranks agreed on; names the failed rank and the reporting rank.

    The original cause of the error is the cause of this one.

    Args:
        on_all_ranks: whether every rank of the job raises the error.
    """

    def __init__(
        self, error: BaseException, *, failed_rank: int, reporter: int, on_all_ranks: bool = False
    ) -> None:
        super().__init__(f"raised on rank {failed_rank}, reported by rank {reporter}")
        self.__cause__ = error.__cause__
        self.failed_rank = failed_rank
        self.reporter = reporter
        self.on_all_ranks = on_all_ranks


def shortened(value: object) -> str:
    """Return any value as a text for a message, of at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_count(key: str, value: object, *, least: int, most: int = 2**62) -> None:
    """Raise ConfigError unless a configured value is an int from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        is_small = not isinstance(value, int) or value <= most
        limit = f">= {least}" if most == 2**62 and is_small else f"from {least:,} to {most:,}"
        raise ConfigError(f"{key} is {value!r}; it must be an integer {limit}")


def check_choice(key: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError unless a configured value is one of the known values."""
    if value not in (known := list(known)):
        raise ConfigError(f"{key} is {value!r}; known: {', '.join(known)}")


def check_flag(key: str, value: object) -> None:
    """Raise ConfigError unless a configured value is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it must be true or false")


def check_path(key: str, value: object) -> None:
    """Raise ConfigError unless a configured value is the path of a file or folder."""
    if not isinstance(value, str | PathLike) or not str(value) or "\0" in str(value):
        raise ConfigError(f"{key} is {value!r}; it must be a path; put a number in quotes: '\"5\"'")


def check_number(
    key: str, value: object, *, least: float = 0.0, most: float = math.inf, above: bool = False
) -> None:
    """Raise ConfigError unless a configured value is a finite number in [least, most].

    Args:
        above: whether `least` itself is refused.
    """
    limit = f"{'>' if above else '>='} {least:g}" + ("" if most == math.inf else f", <= {most:g}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} is {shortened(value)}; it must be a number {limit}")
    # an int may be too large for a float; infinity and NaN fail the comparison, too
    if not least <= value <= min(most, sys.float_info.max) or (above and value == least):
        raise ConfigError(f"{key} is {shortened(value)}; it must be a number {limit}")
