"""What the commands share: how they read the sharder, and how they end."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from dlrm_sharded.distributed import is_from_other_rank, process_group, rank_from_environment
from dlrm_sharded.errors import UserError

log = logging.getLogger(__name__)

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
MEETING_TIMEOUT_S = 30


@contextmanager
def exit_codes(*, all_ranks_alike: bool = False) -> Iterator[None]:
    """Leave the block, or end the process: with 2 and one message for what the user can mend.

    Other errors pass, and end the process with 1 and their traceback.

    Args:
        all_ranks_alike: an error in the block is one that every rank has, before they know of each
            other, such as a bad override; rank 0 alone reports it.
    """
    try:
        yield
    except KeyboardInterrupt:
        if rank_from_environment().rank == 0:
            print("stopped by the user", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED
    except Exception as error:
        # The frames of the traceback hold the sharded model, and it the process group, which must
        # not outlive the interpreter (see `process_group`).
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        message = readable_message(error)
        if message is None and all_ranks_alike and not HydraConfig.initialized():
            message = str(error) if isinstance(error, ValueError) else None  # Hydra's own
        if message is None:
            raise
        rank = rank_from_environment()
        if rank.rank == 0 or not (all_ranks_alike or is_from_other_rank(error)):
            _report(message, rank.rank, failed_rank=getattr(error, "failed_rank", rank.rank))
        if all_ranks_alike and rank.world_size > 1:
            _meet()
        code = EXIT_USER_ERROR
    else:
        return
    sys.exit(code)


def run_hydra(hydra_main: Callable[[], object]) -> None:
    """Call a function that `hydra.main` decorates, with our exit codes for config errors too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.path.append(str(Path.cwd()))  # where users keep their own sharders and datasets
    with exit_codes(all_ranks_alike=True):
        hydra_main()


def own_keys(sharder: DictConfig) -> DictConfig:
    """The sharder's node without the keys of a class that the command line replaced.

    `sharder._target_=my.module.MySharder` names another class, to which the arguments in the
    chosen yaml do not belong; those given on the command line do.
    """
    overrides = HydraConfig.get().overrides.task
    given = [override.lstrip("+").split("=", 1)[0].split(".") for override in overrides]
    if ["sharder", "_target_"] not in given:
        return sharder
    own = sharder.copy()  # keeps its parent, for values such as ${seed}
    with open_dict(own):
        for key in set(sharder) - {path[1] for path in given if path[0] == "sharder" and path[1:]}:
            del own[key]
    return own


def readable_message(error: BaseException) -> str | None:
    """What to tell the user, or None for an error that only a programmer can mend."""
    cause = error.__cause__
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, InstantiationException):
        if isinstance(cause, UserError):
            return str(cause)
        if not isinstance(cause, TypeError | ImportError | ValueError | None):
            return None
    if isinstance(error, HydraException | OmegaConfBaseException):
        details = "" if cause is None or str(cause) in str(error) else f"\n{cause}"
        return f"{error}{details}"
    return None


def _report(message: str, rank: int, *, failed_rank: int) -> None:
    """Through the log once Hydra has set it up, which it has on rank 0 only; else to stderr."""
    line = f"error on rank {failed_rank}: {message}" if failed_rank else f"error: {message}"
    if rank == 0 and HydraConfig.initialized():
        log.error(line)
    else:
        print(line, file=sys.stderr, flush=True)


def _meet() -> None:
    """Wait for the other ranks: torchrun ends them all when the first one ends."""
    with process_group(timeout_s=MEETING_TIMEOUT_S):
        dist.barrier()
