"""Measures hardware on which nothing was measured yet, before the first plan on it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dlrm_sharded.calibration.hardware_costs import needs_measuring
from dlrm_sharded.calibration.sample_store import conditions_of, sample_store, store_in
from dlrm_sharded.calibration.start_measurement import (
    Collected,
    announcement,
    measure_first_start,
)
from dlrm_sharded.files.line_file import turn
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero, patiently_on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.planning import Planner

log = logging.getLogger(__name__)

Planners = Sequence[Planner]
"""Planners with one cost model."""

NewPlanners = Callable[[RunContext], Planners]
"""Makes planners by the costs of ranks as they are known then."""

TURN_S = 60.0
"""Time to wait for a measurement of another job beyond the time that this one's would take."""


def after_first_run(
    planners: Planners | None,
    rank: Rank,
    context: RunContext,
    task: ShardingTask,
    *,
    budget_s: float | None,
    journal: str | None,
    new_planners: NewPlanners,
) -> Planners | None:
    """Return the planners, with measured costs if the hardware needs that; a collective.

    It measures only if the plans depend on costs. Several jobs on one machine take turns, and those
    that waited find what the first one measured. If it hangs, they plan without measurements.

    Args:
        planners: on rank 0 alone.
        budget_s: time in which it may measure, in s; None for none.
        journal: where the store of samples is, see `sample_store`.
        new_planners: called on rank 0.
    """
    exchanges = rank.world_size > 1

    def needs_to() -> bool:
        return planners is not None and _needs_measuring(planners, context, exchanges=exchanges)

    def still_needs_to() -> bool:
        nonlocal planners
        planners = new_planners(context)
        return needs_to()

    if budget_s is None or not on_rank_zero(needs_to):
        return planners
    limit_s = budget_s + TURN_S
    with contextlib.ExitStack() as stack:
        if not patiently_on_rank_zero(lambda: _takes_turn(stack, context, journal, limit_s)):
            return planners
        if not on_rank_zero(still_needs_to):
            return planners
        on_rank_zero(lambda: log.info("%s", announcement(rank, budget_s)))
        collected = measure_first_start(
            rank, context, task.tables, task.batch_size, budget_s=budget_s
        )
        with all_or_none():
            if rank.is_zero and collected is not None:
                return _with_samples(new_planners, context, collected, journal)
    return planners


def _needs_measuring(planners: Planners, context: RunContext, *, exchanges: bool) -> bool:
    """Return whether plans depend on costs of this hardware of which nothing was measured."""
    return (
        context.hardware is not None
        and any(planner.uses_costs for planner in planners)
        and needs_measuring(planners[0].cost_model, context, exchanges=exchanges)
    )


def _takes_turn(
    stack: contextlib.ExitStack, context: RunContext, journal: str | None, limit_s: float
) -> bool:
    """Wait until no other job here measures, and return True; False if one does for too long.

    Without a store that can be written, none waits.
    """
    store = sample_store(context, journal)
    with contextlib.suppress(OSError):
        if store is not None:
            path = store.path.with_suffix(".measuring")
            path.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(turn(path, doing="measures this hardware", limit_s=limit_s))
    return True


def _with_samples(
    new_planners: NewPlanners, context: RunContext, collected: Collected, journal: str | None
) -> Planners:
    """Return planners with what was measured, which is kept unless other work disturbed it."""
    conditions = conditions_of(context)
    assert conditions is not None
    if all(sample.world_size == 1 for sample in collected.samples):
        conditions = dataclasses.replace(conditions, ranks_per_host=None)
    store = sample_store(context, journal)
    if collected.disturbance is not None:
        log.warning(
            "other work ran during the measurement: %s; it counts for this job alone, and the next "
            "one measures again",
            collected.disturbance,
        )
    elif store is not None and all(store.append(conditions, of) for of in collected.samples):
        log.info("kept in %s, so later runs do not measure first", store.path)
        return new_planners(context)
    with tempfile.TemporaryDirectory() as folder:
        own = store_in(Path(folder), context)
        assert own is not None
        for sample in collected.samples:
            own.append(conditions, sample)
        return new_planners(dataclasses.replace(context, started=Path(folder)))
