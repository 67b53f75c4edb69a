"""The console commands; if a package is missing, they print in one line what to install."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from dlrm_sharded.files.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR
from dlrm_sharded.ranks.version_sets import missing_text

TRAINING = "dlrm_sharded.train"


def _run(module: str, check: Callable[[], None] = lambda: None) -> Any:
    """Call `main` of a module, which may need packages for training, and return its result."""
    try:
        check()
        main = import_module(f"dlrm_sharded.{module}").main
    except ModuleNotFoundError as error:
        if (reason := missing_text(error)) is None:
            raise
        print(f"error: {reason}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        return EXIT_INTERRUPTED
    return main()


def _check_overrides() -> None:
    """Refuse overrides of a training that no rank could compose, before torch is loaded."""
    overrides = sys.argv[sys.argv.index(TRAINING) + 1 :] if TRAINING in sys.argv else ["-"]
    if any(word.startswith(("-", "hydra.searchpath")) for word in overrides):
        return  # which may name other configs than those of conf
    from dlrm_sharded.commands.hydra_app import compose_training
    from dlrm_sharded.commands.messages import ended_by_user_errors

    with ended_by_user_errors():
        compose_training(overrides)


calibrate = functools.partial(_run, "commands.calibrate")
check_install = functools.partial(_run, "commands.check_install")
compare = functools.partial(_run, "commands.compare")
data = functools.partial(_run, "commands.data")
evaluate = functools.partial(_run, "commands.evaluate")
export = functools.partial(_run, "commands.export")
plan = functools.partial(_run, "commands.plan")
report = functools.partial(_run, "commands.report")
torchrun = functools.partial(_run, "ranks.torchrun", check=_check_overrides)
train = functools.partial(_run, "train")
train_policy = functools.partial(_run, "commands.train_policy")
