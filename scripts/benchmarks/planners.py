"""Planners of sharders, and tasks as they plan them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.commands.sharders import build_planner
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder, neuroshard_sharder
from dlrm_sharded.sharders.planning import Planner

SHARDERS_TEXT = "yamls of conf/sharder; 'neuroshard,sharder.seed=1' is one with other settings"


@functools.cache
def planner_of(sharder: str, *, device: str = "cpu", hardware: Hardware | None = None) -> Planner:
    """Build the planner of a yaml and of overrides after commas, with the learned cost model."""
    name, *overrides = sharder.split(",")
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("plan", [f"sharder={name}", "cost_model=learned", "task=unused", *overrides])
        return build_planner(cfg, RunContext(device=device, hardware=hardware))


def planners_of(
    sharders: Sequence[str], *, device: str, hardware: Hardware | None = None
) -> dict[str, Planner]:
    return {sharder: planner_of(sharder, device=device, hardware=hardware) for sharder in sharders}


def neuroshard(prices: LearnedCostModel, **keys: Any) -> NeuroShardSharder:
    """Return the sharder that searches under prices, on their device."""
    return neuroshard_sharder(SharderContext(RunContext(prices.device), prices), **keys)


def on_device(task: ShardingTask, device: str) -> ShardingTask:
    """Return the task on a device, with access profiles, which some sharders would have to make."""
    task = with_profiles(task)
    topology = dataclasses.replace(task.topology, compute_device=device)
    return dataclasses.replace(task, topology=topology)
