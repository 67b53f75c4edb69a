"""Turns errors that users can fix into the message that a command prints."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException, InstantiationException, MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from dlrm_sharded.commands.yamls import options_of
from dlrm_sharded.files.errors import EXIT_USER_ERROR, RankError, UserError
from dlrm_sharded.ranks.version_sets import missing_text

DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
"""Errors of writes that only the user can fix; they do not name their file."""

NO_MEMORY = re.compile(
    r"can't allocate memory|DefaultCPUAllocator: not enough memory|CUDA out of memory"
    r"|Storage size calculation overflowed|numel: integer multiplication overflow"
)
"""Parts of torch's messages about memory; on a CPU, it raises plain RuntimeErrors."""

MAX_MESSAGE = 2000
"""Largest number of characters of a message that are printed."""

UNKNOWN_KEY = "Could not override"
"""Beginning of Hydra's message for a key that a config does not have."""


@contextmanager
def ended_by_user_errors() -> Iterator[None]:
    """End a process that is no rank with one line if the body raises an error of the user."""
    try:
        yield
    except Exception as error:
        if (message := readable_message(error)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def readable_message(error: BaseException) -> str | None:
    """Return the message for the user, or None for an error that only a programmer can fix.

    A very long message loses its middle.
    """
    message = _message(error)
    if message is not None and (num_left_out := len(message) - MAX_MESSAGE) > 0:
        half = MAX_MESSAGE // 2
        message = f"{message[:half]} ... ({num_left_out:,} characters) ... {message[-half:]}"
    return message


def _message(error: BaseException) -> str | None:
    cause = error.__cause__
    if isinstance(cause, RankError):
        cause = cause.__cause__
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error):
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        return f"{error.strerror}: a file cannot be written; free space, or write to another disk"
    if (reason := _lack_of_memory(error) or missing_text(error)) is not None:
        return reason
    if isinstance(error, InstantiationException) and cause is not None:
        reason = _message(cause)
        if reason is not None or not isinstance(cause, TypeError | ImportError | ValueError):
            return reason
    if isinstance(error, MissingMandatoryValue) and error.full_key:
        return f"{error.full_key} is not set"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(Path(error.missing_cfg_file), error.options)
    if isinstance(error, HydraException | OmegaConfBaseException):
        is_repeated = str(error).startswith(UNKNOWN_KEY) or str(cause) in str(error)
        details = "" if is_repeated or cause is None else f"\n{cause}"
        return f"{error}{details}{_known_keys(cause)}"
    return None


def _lack_of_memory(error: BaseException) -> str | None:
    """Return the message for an allocation that failed; None for any other error."""
    text = " ".join(str(error).split())
    # Torch's class is compared by name, because the driver of a sweep does not load torch.
    is_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not is_class and not (isinstance(error, RuntimeError) and NO_MEMORY.search(text)):
        return None
    if found := re.search(r"allocate (\d+) bytes", text):
        text = f"{int(found[1]) / 2**30:,.2f} GiB cannot be allocated"
    return (
        f"there is not enough memory: {text or 'an allocation failed'}. Lower batch_size, the "
        "layers of the model, data.block_rows, or what topology gives to tables; or use "
        "more memory or ranks"
    )


def _unknown_option(named: Path, options: Sequence[str] | None) -> str:
    """Return the message for an unknown option of a group, such as sharder/dimm."""
    known = ", ".join(options or options_of(str(named.parent)))
    group = "config" if named.parent == Path() else named.parent
    return f"there is no {group} {named.name!r}; known: {known}; your own need --config-dir"


def _known_keys(error: BaseException | None) -> str:
    """Return a line that lists the known keys of a config, after an error about an unknown key."""
    parent = getattr(error, "parent_node", None)
    if not isinstance(error, ConfigKeyError | ConfigAttributeError) or not parent:
        return ""
    names = sorted(str(key) for key in parent if not str(key).startswith("_"))
    return f"\nknown there: {', '.join(names)}"
