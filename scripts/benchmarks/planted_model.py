"""A model whose steps wait a known time on one rank, which the study of sweeps plants.

The wait depends on the plan file, so that the runs that are compared have equal settings.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from dlrm_sharded.datasets.presets import Tables
from dlrm_sharded.model.dlrm import Dlrm, dlrm
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.attempt import rank_number

WAITS = "DLRM_SHARDED_PLANTED_WAITS"
"""Variable with the waits in ms, as JSON: by the name of a plan file, and of slow hosts."""

SLOW_HOST, SLOW_HOSTS = "slow host", "slow hosts"
"""What adds its wait to all runs, and to half of them by chance, as if each had other hosts."""

WAITING_RANK = 1


def tables() -> Tables:
    """Return tables of equal load, so that a wait on any rank lengthens the step."""
    return tuple(Table(f"table_{i}", 20_000, 32, 30.0) for i in range(8))


def waiting_dlrm(*arguments: Any, **options: Any) -> Dlrm:
    """Build a DLRM that waits in the forward pass of one rank."""
    model = dlrm(*arguments, **options)
    overrides = dict(item.split("=", 1) for item in HydraConfig.get().overrides.task)
    name, waits = Path(overrides["sharder.path"]).stem, json.loads(os.environ[WAITS])
    is_on_slow_host = random.Random(f"{name} {overrides['seed']}").random() < 0.5
    wait_ms = waits[name] + waits[SLOW_HOST] + is_on_slow_host * waits[SLOW_HOSTS]
    if rank_number() == WAITING_RANK:
        model.over_arch.register_forward_hook(lambda *_: _wait(wait_ms))
    return model


def _wait(wait_ms: float) -> None:
    """Keep the core busy, as a stage would."""
    ends_s = time.perf_counter() + wait_ms / 1e3
    while time.perf_counter() < ends_s:
        pass
