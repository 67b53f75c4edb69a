"""Ends every command with its exit code and one message that gives the reason."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException

from dlrm_sharded.commands.messages import readable_message
from dlrm_sharded.files.errors import (
    EXIT_ERROR,
    EXIT_USER_ERROR,
    RANK_EXIT_PREEMPTED,
    ConfigError,
    EndedRankError,
    RankError,
)
from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.ranks.attempt import rank_number
from dlrm_sharded.ranks.process import forget_frames, quiet_without_reader, set_handlers
from dlrm_sharded.ranks.store_questions import end_despite_questions

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
AGAIN_S = 0.1
"""Time after which a signal that a finalizer swallowed is raised again."""
MEETING_TIMEOUT_S = 30
"""Time that a rank waits for the others before it ends with an error that all ranks share."""


_runs_command = False
"""It is set once Hydra has called the command: from then on, errors are not Hydra's."""


class ReportedExit(SystemExit):
    """Ends a process whose user has been shown the reason.

    For a caller that runs the command in its own process, `reason` is the message, and `is_agreed`
    tells whether all ranks end with it, so that they could continue together.
    """

    def __init__(self, code: int, reason: str, *, is_agreed: bool = False) -> None:
        super().__init__(code)
        self.reason = reason
        self.is_agreed = is_agreed


@contextmanager
def exit_codes(*, all_ranks_alike: bool = False) -> Iterator[None]:
    """End the process with one message and exit code 2 after an error that the user can fix.

    Some errors have another `exit_code`. Errors that are not the user's pass through the block, and
    end the process with their traceback and exit code 1.

    Args:
        all_ranks_alike: whether the block runs before the ranks know of each other, so that every
            rank has the same errors there, such as a bad override; only rank 0 reports them. An
            OSError is the exception, because only rank 0 makes the run's folder.
    """
    global _runs_command
    _runs_command |= not all_ranks_alike
    is_agreed = False
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters
            sys.stdout.reconfigure(errors="backslashreplace")
        with quiet_without_reader(), _raised_signals():
            yield
    except KeyboardInterrupt as error:
        number = _number(error)
        code, reason = 128 + number, f"stopped by {number.name}"
        if number == signal.SIGINT:
            reason = "stopped by the user"
        end_despite_questions(code)
        if rank_number() == 0:
            print(reason, file=sys.stderr, flush=True)
    except Exception as error:
        forget_frames(error)  # the group must be gone before the interpreter ends
        gc.collect()
        message = readable_message(error)
        if message is None and not _runs_command and isinstance(error, ValueError):
            message = str(error)  # raised by Hydra
        if message is None:
            end_despite_questions(EXIT_ERROR)
            raise
        code, reason = getattr(error, "exit_code", EXIT_USER_ERROR), message
        end_despite_questions(code)
        rank, cause = rank_number(), error.__cause__
        if not isinstance(cause, RankError):
            # Hydra's error for an unknown option is an OSError, too.
            is_of_rank = isinstance(error, OSError) and not isinstance(error, HydraException)
            failed_rank = 0 if all_ranks_alike and not is_of_rank else rank
            cause = RankError(error, failed_rank=failed_rank, reporter=failed_rank)
        is_agreed, is_said = cause.on_all_ranks, rank == cause.reporter
        if code != RANK_EXIT_PREEMPTED:
            of_rank = f" on rank {cause.failed_rank}" if cause.failed_rank else ""
            message = f"error{of_rank}: {message}"
        if is_said and rank == 0 and HydraConfig.initialized():  # Hydra has set up the log
            log.log(logging.INFO if code == RANK_EXIT_PREEMPTED else logging.ERROR, "%s", message)
        elif is_said:
            print(message, file=sys.stderr, flush=True)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _write_error_file(error, reason, exit_code=code, line=message, is_said=is_said)
            if code != RANK_EXIT_PREEMPTED and (
                all_ranks_alike or is_agreed or isinstance(error, EndedRankError)
            ):
                _end_together(reason, is_reported=is_said, is_first=all_ranks_alike)
    else:
        end_despite_questions(0)
        return
    raise ReportedExit(code, reason, is_agreed=is_agreed)


@contextmanager
def _raised_signals() -> Iterator[None]:
    """Make signals to stop unwind the block as Ctrl-C does, to clean up files and child processes.

    In ranks, this is left to the launcher: a rank that waits for another in a library cannot raise.
    Training handles the same signals as requests for a checkpoint.

    Python ignores exceptions in a finalizer: a signal that arrived there is raised again.
    """
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def raise_again(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            before(ignored)
            return
        number = _number(ignored.exc_value)
        if number in STOP_SIGNALS:
            signal.signal(number, _stop)
        timers.append(threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)))
        timers[-1].start()

    sys.unraisablehook = raise_again
    numbers = [n for n in STOP_SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    if "RANK" not in os.environ:
        set_handlers(dict.fromkeys(numbers, _stop))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = before
        # after a stop, the process ends undisturbed
        set_handlers({n: signal.SIG_DFL for n in numbers if signal.getsignal(n) is _stop})


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # schedulers send it twice
    raise KeyboardInterrupt(signal.Signals(number))


def _number(error: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that asked the process to stop; for Ctrl-C, Python does not name it."""
    number: signal.Signals = error.args[0] if error.args else signal.SIGINT
    return number


def _end_together(message: str, *, is_reported: bool, is_first: bool) -> None:
    """Wait until all ranks end; otherwise torchrun would kill the others before they exit with 2.

    Args:
        is_first: whether this rank found the error itself. It then informs the others, which would
            otherwise wait for it to join their process group.
    """
    from dlrm_sharded.ranks.job_store import announce_end, wait_for_all_ranks  # loads torch

    # Launchers end ranks that are late, or whose store is gone or never existed.
    with contextlib.suppress(RuntimeError, ConfigError):
        if is_first:
            announce_end(message, is_reported=is_reported, timeout_s=MEETING_TIMEOUT_S)
        wait_for_all_ranks(MEETING_TIMEOUT_S)


def _write_error_file(error: Exception, message: str, **about: object) -> None:
    """Write the file from which torchrun and TorchX read the reason why a rank ended.

    Args:
        about: what our launcher reads: `exit_code`, the `line` that users see of the error, and
            `is_said`, whether this rank has printed it.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about |= {"error_class": type(error).__name__, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            fields = {"message": {"message": message, "extraInfo": about}}
            replace_file(path, json.dumps(fields).encode())
