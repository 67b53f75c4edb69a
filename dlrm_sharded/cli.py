"""How the commands end: what the user can mend is one readable message and exit code 2."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from dlrm_sharded.distributed import is_from_other_rank, process_group, rank_from_environment
from dlrm_sharded.errors import UserError

EXIT_USER_ERROR = 2
MEETING_TIMEOUT_S = 30


@contextmanager
def exit_codes() -> Iterator[None]:
    """Leave the block, or end the process: with 2 and one message for what the user can mend.

    Other errors pass, and end the process with 1 and their traceback.
    """
    try:
        yield
    except Exception as error:
        # The frames of the traceback hold the sharded model, and it the process group, which must
        # not outlive the interpreter (see `process_group`).
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        message = readable_message(error)
        if message is None:
            raise
        if not is_from_other_rank(error):
            _report(message, everywhere=not isinstance(error, UserError))
    else:
        return
    sys.exit(EXIT_USER_ERROR)


def run_hydra(hydra_main: Callable[[], object]) -> None:
    """Call a function that `hydra.main` decorates, with our exit codes for config errors too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    with exit_codes():
        hydra_main()


def readable_message(error: BaseException) -> str | None:
    """What to tell the user, or None for an error that only a programmer can mend."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, InstantiationException):
        cause = error.__cause__
        if isinstance(cause, UserError):
            return str(cause)
        if cause is None or isinstance(cause, TypeError | ImportError | ValueError):
            return str(error)
        return None
    if isinstance(error, HydraException | OmegaConfBaseException):
        return str(error)
    return None


def _report(message: str, *, everywhere: bool) -> None:
    """Print the message; where all ranks have it alike, on rank 0 only.

    torchrun ends all ranks when the first one ends, so they wait until rank 0 has printed.
    """
    rank = rank_from_environment()
    if rank.rank == 0 or not everywhere:
        where = f" (rank {rank.rank})" if rank.rank else ""
        print(f"error{where}: {message}", file=sys.stderr, flush=True)
    if everywhere and rank.world_size > 1 and not dist.is_initialized():
        with process_group(timeout_s=MEETING_TIMEOUT_S):
            dist.barrier()
