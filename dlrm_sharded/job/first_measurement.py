"""Measures hardware on which nothing was measured yet, before the first plan on it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from dlrm_sharded.calibration.collect import collect
from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.hardware_costs import needs_measuring, samples_of
from dlrm_sharded.calibration.plan_limits import BATCH_SIZES, FIRST_RUN
from dlrm_sharded.calibration.sample_store import (
    SampleStore,
    drawn_conditions,
    sample_store,
    store_in,
)
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.files.line_file import turn
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero, patiently_on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.planning import Planner

log = logging.getLogger(__name__)

NewPlanner = Callable[[RunContext], Planner]
"""Makes a planner with the costs that are known for a context."""

Collected = list[tuple[Sample, Disturbance]]
"""Samples, each with the signs of other work during its measurement."""

MIN_SAMPLES = 3
"""Smallest number of measured plans from which costs are fitted."""

SMALLER_BATCH = 4
"""Divisor of the run's batch size for about every other plan."""

TURN_S = 60.0
"""Additional time to wait for another job's measurement, beyond this job's own time budget."""


def with_measured_costs(
    planner: Planner | None,
    rank: Rank,
    context: RunContext,
    task: ShardingTask,
    *,
    budget_s: float | None,
    journal: str | None,
    new_planner: NewPlanner,
    snapshot: str | None = None,
) -> Planner | None:
    """Return the planner, with measured costs if the hardware needs that; a collective.

    It measures only if plans depend on costs, or in a sweep, whose jobs share costs. Several jobs
    on one machine take turns, and those that waited use what the first job measured. If that job
    hangs, they plan without measurements.

    Args:
        planner: the planner on rank 0; None on the others.
        budget_s: time that the measurement may take, in s; None for no measurement.
        journal: where the store of samples is, see `sample_store`.
        new_planner: called on rank 0 only.
        snapshot: folder of the costs that the jobs of a sweep share.
    """

    def needs_to(by: Planner | None) -> bool:
        return (
            by is not None
            and (by.uses_costs or snapshot is not None)
            and context.hardware is not None
            and needs_measuring(by.cost_model, context, exchanges=rank.world_size > 1)
        )

    if budget_s is None or not on_rank_zero(lambda: needs_to(planner)):
        return planner
    store, limit_s = sample_store(context, journal), budget_s + TURN_S
    with contextlib.ExitStack() as stack:
        if not patiently_on_rank_zero(lambda: _takes_turn(stack, store, limit_s)):
            return planner
        with all_or_none():  # another job may have measured meanwhile
            is_measured = rank.is_zero and samples_of(context, journal, snapshot)
            present = new_planner(context) if is_measured else planner
        if not on_rank_zero(lambda: needs_to(present)):
            return present
        collected, other_work = _measured(rank, context, task, budget_s)
        with all_or_none():
            if rank.is_zero and len(collected) >= MIN_SAMPLES:
                return _with_samples(new_planner, context, collected, other_work, store, snapshot)
            if rank.is_zero:
                log.warning(
                    "measured only %d plans in %.0f s, too few to know the costs of this hardware; "
                    "raise calibrate=SECONDS",
                    len(collected),
                    budget_s,
                )
    return present


def _measured(
    rank: Rank, context: RunContext, task: ShardingTask, budget_s: float
) -> tuple[Collected, str | None]:
    """Log what is measured, and measure; return samples, on rank 0, and a text about other work."""
    if rank.is_zero:
        log.info(
            "nothing was measured on this hardware yet; the ranks now measure synthetic plans of "
            "the tables%s, once, for %.0f s (calibrate=never, or None in plan_model, skips this)",
            f" and exchanges of all {rank.world_size} ranks" if rank.world_size > 1 else "",
            budget_s,
        )
    assert context.optimizer is not None
    batch_size = min(task.batch_size, BATCH_SIZES[rank.device.type][-1])
    collected: Collected = []
    other_work = collect(
        rank,
        lambda *measured: collected.append(measured),
        optimizer=context.optimizer,
        sizes=FIRST_RUN,
        budget_s=budget_s,
        tables=task.tables,
        batch_sizes=(batch_size, batch_size // SMALLER_BATCH),
    )
    return collected, other_work


def _takes_turn(stack: contextlib.ExitStack, store: SampleStore | None, limit_s: float) -> bool:
    """Wait until no other job here measures, and return True; return False after `limit_s`.

    Without a writable store, jobs do not wait.
    """
    with contextlib.suppress(OSError):
        if store is not None:
            path = store.path.with_suffix(".measuring")
            path.parent.mkdir(parents=True, exist_ok=True)
            return stack.enter_context(turn(path, doing="measures this hardware", limit_s=limit_s))
    return True


def _with_samples(
    new_planner: NewPlanner,
    context: RunContext,
    collected: Collected,
    other_work: str | None,
    store: SampleStore | None,
    snapshot: str | None,
) -> Planner:
    """Return a planner with the samples, which are stored unless other work disturbed them.

    Samples that are not stored count only for this plan, or for the jobs of a sweep.
    """
    if other_work is not None:
        log.warning(
            "the measurement was disturbed: %s; only this plan, or this sweep, uses it, and the "
            "next one measures again",
            other_work,
        )
    elif store is None:
        log.info("journal is none, so only this plan, or this sweep, uses the measurement")
    elif _append(store, context, collected):
        log.info("kept %d plans in %s, so later runs do not measure", len(collected), store.path)
        return new_planner(context)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(snapshot or own)
        own_store = store_in(folder, context)
        assert own_store is not None, "unknown hardware is not measured"
        _append(own_store, context, collected)
        return new_planner(dataclasses.replace(context, samples_dir=None if snapshot else folder))


def _append(store: SampleStore, context: RunContext, collected: Collected) -> bool:
    """Write samples to a store, and return whether all of them were written."""
    conditions = drawn_conditions(context)
    return all(store.append(conditions, *measured) for measured in collected)
