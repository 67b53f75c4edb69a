"""Starts the commands that Hydra configures, and knows the folder of their yaml files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from dlrm_sharded.attempt import started
from dlrm_sharded.commands.exit_codes import exit_codes

PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
"""Folder of the yaml files: inside an installed package, but beside the package in a checkout."""


def run_hydra(hydra_main: Callable[[], object]) -> None:
    """Call a function that `hydra.main` decorates, with our exit codes for config errors too."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # As Hydra's own `now`, but a restarted job finds the folder of its first attempt.
    OmegaConf.register_new_resolver("started", started, use_cache=True, replace=True)
    sys.path.append(str(Path.cwd()))  # where users keep their own sharders and datasets
    with exit_codes(all_ranks_alike=True):
        hydra_main()
