"""Measures this machine for commands that plan for it without running there: hardware=here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from dlrm_sharded.commands.sharders import start_budget
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner

log = logging.getLogger(__name__)

Build = Callable[[RunContext], Sequence[Planner]]
"""Builds the planners of a command, which share a cost model."""


def measured_here(
    cfg: DictConfig, context: RunContext, task: ShardingTask, build: Build, *, folder: Path
) -> tuple[RunContext, Sequence[Planner]]:
    """Return planners for ranks on this machine, whose prices are measured first if they need it.

    A single rank measures lookups; exchanges keep the prices of the prior.

    Args:
        folder: is there as long as cost models are loaded; keeps what was measured.

    Returns:
        The context of the planners, and the planners.
    """
    from dlrm_sharded.job.first_start import keep, may_need  # which loads torch

    context = dataclasses.replace(context, started=folder)
    planners, budget_s = build(context), start_budget(cfg)
    if budget_s is None or not may_need(planners, context, exchanges=False):
        return context, planners
    from dlrm_sharded.calibration.start_file import start_path, write_start
    from dlrm_sharded.calibration.start_measurement import announcement, measure_first_start
    from dlrm_sharded.ranks.distributed import process_group

    alone = dataclasses.replace(context, ranks_per_host=1)
    with process_group() as rank:
        if rank.device.type != context.device:  # a task for CPUs, on a machine with a GPU
            return context, planners
        log.info("%s", announcement(rank, budget_s))
        start = measure_first_start(rank, alone, task.tables, task.batch_size, budget_s=budget_s)
    if start is None:
        return context, planners
    keep(alone, start)
    write_start(start_path(folder, alone), start)
    return context, build(context)
