"""What the commands share: how they read the sharder, and how they end."""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from dlrm_sharded.context import RunContext
from dlrm_sharded.errors import ConfigError, IncompleteSweepError, UserError, is_from_other_rank
from dlrm_sharded.planning import Diagnose, Planner
from dlrm_sharded.sharders.base import SharderContext

log = logging.getLogger(__name__)

EXIT_INCOMPLETE = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
MEETING_TIMEOUT_S = 30


class ReportedExit(SystemExit):
    """The end of a process that has said why; `reason` says it again to what runs in its place."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


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
        code, reason = EXIT_INTERRUPTED, "stopped by the user"
        if _rank() == 0:
            print(reason, file=sys.stderr, flush=True)
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
        if _rank() == 0 or not (all_ranks_alike or is_from_other_rank(error)):
            _report(message, failed_rank=getattr(error, "failed_rank", _rank()))
        if all_ranks_alike and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _meet()
        incomplete = isinstance(error, IncompleteSweepError)
        code, reason = EXIT_INCOMPLETE if incomplete else EXIT_USER_ERROR, message
    else:
        return
    raise ReportedExit(code, reason)


def run_hydra(hydra_main: Callable[[], object]) -> None:
    """Call a function that `hydra.main` decorates, with our exit codes for config errors too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.path.append(str(Path.cwd()))  # where users keep their own sharders and datasets
    with exit_codes(all_ranks_alike=True):
        hydra_main()


def build_planner(
    cfg: DictConfig, context: RunContext, *, diagnose: Diagnose | None = None
) -> Planner:
    """Build the sharder and the cost model of a config.

    Nodes with `_partial_: true` are called with their context: the cost model with the run's, a
    sharder with a `SharderContext`, which has the cost model too.
    """
    cost_model = None
    if cfg.get("cost_model") is not None:
        cost_model = _with_context("cost_model", instantiate(cfg.cost_model), context)
        if not hasattr(cost_model, "predict"):
            raise ConfigError(
                f"cost_model._target_ makes {cost_model!r}, which has no method `predict`"
            )
    sharder_context = SharderContext(context, cost_model)
    sharder = _with_context("sharder", instantiate(own_keys(cfg.sharder)), sharder_context)
    if not hasattr(sharder, "shard"):
        raise ConfigError(f"sharder._target_ makes {sharder!r}, which has no method `shard`")
    return Planner(sharder, cost_model, diagnose)


def _with_context(group: str, made: Any, context: RunContext | SharderContext) -> Any:
    """Call what a node with `_partial_: true` made; leave anything else as it is."""
    if not isinstance(made, functools.partial):
        return made
    try:
        return made(context)
    except TypeError as error:  # a key that the function does not have
        raise ConfigError(f"{group}: {error}") from error


def own_keys(sharder: DictConfig) -> DictConfig:
    """The sharder's node without the keys of a class that the command line replaced.

    `sharder._target_=my.module.MySharder` names another class, to which the arguments in the
    chosen yaml do not belong; those given on the command line do.
    """
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
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
    if isinstance(error, MissingMandatoryValue) and error.full_key:
        return f"{error.full_key} is not set"
    if isinstance(error, HydraException | OmegaConfBaseException):
        details = "" if cause is None or str(cause) in str(error) else f"\n{cause}"
        return f"{error}{details}{_known_keys(cause)}"
    return None


def _known_keys(error: BaseException | None) -> str:
    """A line with the keys that a config has, for one that it has not."""
    parent = getattr(error, "parent_node", None)
    if not isinstance(error, ConfigKeyError | ConfigAttributeError) or not parent:
        return ""
    names = sorted(str(key) for key in parent if not str(key).startswith("_"))
    return f"\nknown there: {', '.join(names)}"


def _rank() -> int:
    """As `rank_from_environment` says, without torch."""
    return int(os.environ.get("RANK", "0"))


def _report(message: str, *, failed_rank: int) -> None:
    """Through the log once Hydra has set it up, which it has on rank 0 only; else to stderr."""
    line = f"error on rank {failed_rank}: {message}" if failed_rank else f"error: {message}"
    if _rank() == 0 and HydraConfig.initialized():
        log.error(line)
    else:
        print(line, file=sys.stderr, flush=True)


def _meet() -> None:
    """Wait for the other ranks: torchrun ends them all when the first one ends."""
    import torch.distributed as dist

    from dlrm_sharded.distributed import process_group

    with process_group(timeout_s=MEETING_TIMEOUT_S):
        dist.barrier()
