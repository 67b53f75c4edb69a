"""Ends every command with its exit code and one message that gives the reason."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig

from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.errors import (
    IncompleteSweepError,
    PreemptedError,
    RankError,
    UnsavedError,
)

log = logging.getLogger(__name__)

EXIT_PREEMPTED = 0
EXIT_OTHER = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
MEETING_TIMEOUT_S = 30
"""Time that a rank waits for the others before it ends with an error that all ranks have."""


class ReportedExit(SystemExit):
    """Ends a process whose user has been shown the reason.

    `reason` is the message, for a caller that runs the command inside its own process.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


@contextmanager
def exit_codes(*, all_ranks_alike: bool = False) -> Iterator[None]:
    """End the process with one message and exit code 2 after an error that the user can fix.

    Other errors pass through the block and end the process with their traceback and exit code 1.

    Args:
        all_ranks_alike: the block runs before the ranks know of each other, and every rank meets
            the same errors there, such as a bad override. Rank 0 alone reports them. An OSError
            is the exception: rank 0 alone makes the run's folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        code, reason = EXIT_INTERRUPTED, "stopped by the user"
        if _rank() == 0:
            print(reason, file=sys.stderr, flush=True)
    except Exception as error:
        # The frames of the traceback refer to the sharded model, and the model to the process
        # group, which must be gone before the interpreter ends (see `process_group`).
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        message = readable_message(error)
        if message is None and all_ranks_alike and not HydraConfig.initialized():
            message = str(error) if isinstance(error, ValueError) else None  # raised by Hydra
        if message is None:
            raise
        on_every_rank = all_ranks_alike and not isinstance(error, OSError)
        source = error.__cause__
        if not isinstance(source, RankError):
            source = RankError(error, failed_rank=_rank(), reporter=0 if on_every_rank else _rank())
        if _rank() == source.reporter:
            if isinstance(error, PreemptedError):
                log.info("%s", message)
            else:
                _report(message, failed_rank=source.failed_rank)
        if on_every_rank and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Else torchrun would kill the others before they end with this exit code.
            from dlrm_sharded.distributed import wait_for_all_ranks  # loads torch

            wait_for_all_ranks(MEETING_TIMEOUT_S)
        code, reason = _exit_code(error), message
    else:
        return
    raise ReportedExit(code, reason)


def _exit_code(error: Exception) -> int:
    if isinstance(error, PreemptedError):
        return EXIT_PREEMPTED
    is_other = isinstance(error, IncompleteSweepError | UnsavedError)
    return EXIT_OTHER if is_other else EXIT_USER_ERROR


def _rank() -> int:
    """Return what `rank_from_environment` returns, without loading torch."""
    return int(os.environ.get("RANK", "0"))


def _report(message: str, *, failed_rank: int) -> None:
    """Log the message where Hydra has set up the log, which is on rank 0; else print it."""
    line = f"error on rank {failed_rank}: {message}" if failed_rank else f"error: {message}"
    if _rank() == 0 and HydraConfig.initialized():
        log.error(line)
    else:
        print(line, file=sys.stderr, flush=True)
