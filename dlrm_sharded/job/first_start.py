"""Measures the hardware before the first plan on it, so that the plan has prices of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dlrm_sharded.calibration.hardware_costs import needs_start, start_folders
from dlrm_sharded.calibration.start_file import (
    FirstStart,
    find_start,
    start_folder,
    start_path,
    write_start,
)
from dlrm_sharded.calibration.start_measurement import announcement, measure_first_start
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.line_file import turn
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero, patiently_on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.planning import Planner

log = logging.getLogger(__name__)

NewPlanner = Callable[[RunContext], Planner]
"""Makes a planner with the prices of ranks."""

TURN_S = 60.0
"""Time to wait for a measurement of another job beyond the time that this one's would take."""


def with_first_start(
    planner: Planner | None,
    rank: Rank,
    context: RunContext,
    task: ShardingTask,
    *,
    budget_s: float | None,
    new_planner: NewPlanner,
    snapshot: str | None = None,
) -> Planner | None:
    """Return the planner, with measured prices if this is the first start; a collective.

    It measures only for a planner whose sharder and prices need it. Several jobs on one machine
    take turns, and those that waited find what the first one measured. If it hangs, they plan
    without measurements.

    Args:
        planner: on rank 0 alone.
        budget_s: time in which it may measure, in s; None for none.
        new_planner: makes the planner with what was measured; called on rank 0.
        snapshot: folder of the prices that a sweep's runs share.
    """
    if budget_s is None or not on_rank_zero(
        lambda: planner is not None and may_need([planner], context, exchanges=True)
    ):
        return planner
    folders = start_folders(context, snapshot)
    with contextlib.ExitStack() as stack:
        found = patiently_on_rank_zero(
            lambda: _is_found(context, folders) if _takes_turn(stack, context, budget_s) else None
        )
        if found is None:
            return planner
        start = None
        if not found:
            on_rank_zero(lambda: log.info("%s", announcement(rank, budget_s)))
            start = measure_first_start(
                rank, context, task.tables, task.batch_size, budget_s=budget_s
            )
        with all_or_none():
            if rank.is_zero and start is not None:
                return _with_start(new_planner, snapshot, context, start)
            if rank.is_zero and found:
                return new_planner(context)
    return planner


def may_need(planners: Sequence[Planner], context: RunContext, *, exchanges: bool) -> bool:
    """Return whether plans depend on prices that no measurement has adapted to this hardware.

    Args:
        planners: planners with one cost model.
        exchanges: whether prices of exchanges must have been measured, too.
    """
    model = planners[0].cost_model
    if context.hardware is None or not any(of.uses_costs for of in planners):
        return False
    lacks_exchanges = (
        isinstance(model, LearnedCostModel)
        and model.standing is not None
        and (model.standing.kind, model.standing.error) == ("measured", None)
    )
    return needs_start(model, context) or (exchanges and lacks_exchanges)


def _takes_turn(stack: contextlib.ExitStack, context: RunContext, budget_s: float) -> bool:
    """Wait until no other job here measures, and return True; False if one does for too long.

    With a cache that is not writable, none waits.
    """
    with contextlib.suppress(OSError):
        path = start_path(start_folder(), context).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        limit_s = budget_s + TURN_S
        return stack.enter_context(turn(path, doing="measures this hardware", limit_s=limit_s))
    return True


def _is_found(context: RunContext, folders: list[Path]) -> bool:
    return find_start(context, folders, may_lack_exchanges=False) is not None


def _with_start(
    new_planner: NewPlanner, snapshot: str | None, context: RunContext, start: FirstStart
) -> Planner:
    """Return the planner with measured prices, and keep what was measured for later starts."""
    keep(context, start)
    if snapshot is not None:  # the other jobs of the sweep have these prices, too
        write_start(start_path(Path(snapshot), context), start)
        return new_planner(context)
    with tempfile.TemporaryDirectory() as folder:
        write_start(start_path(Path(folder), context), start)
        return new_planner(dataclasses.replace(context, started=Path(folder)))


def keep(context: RunContext, start: FirstStart) -> None:
    """Write a first start to the cache, unless it was disturbed; say which."""
    if start.disturbance is not None:
        log.warning(
            "the prices were measured beside other work: %s; they are not kept, and the next start "
            "measures again",
            start.disturbance,
        )
        return
    path = start_path(start_folder(), context)
    try:
        write_start(path, start)
    except (OSError, ConfigError) as error:
        log.warning("the measured prices are not kept, so the next start measures again: %s", error)
    else:
        log.info("kept in %s, so later starts do not measure", path)
