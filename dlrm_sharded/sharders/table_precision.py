"""Puts tables into fp16 where they do not fit in fp32: the largest ones first."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask

log = logging.getLogger(__name__)

MAX_NAMED = 8
"""Largest number of tables that a message names."""

Search = Callable[[ShardingTask], ShardingPlan]


def plan_that_fits(task: ShardingTask, search: Search) -> ShardingPlan:
    """Return a plan in fp32 if there is one; else one with as few tables in fp16 as are needed.

    The fewest tables are found by their sizes alone. Where a search finds no plan for these, it is
    repeated with ever more of them.

    Raises:
        InfeasibleTaskError: no plan fits with all tables in fp16 either.
    """
    reason: InfeasibleTaskError | None = None
    for names in _choices(task):
        try:
            plan = search(in_half(task, names))
        except InfeasibleTaskError as error:
            reason = error
            continue
        if names:
            shown = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
            log.warning(
                "no plan was found with all tables in fp32; %d of %d are in fp16: %s",
                len(names),
                len(task.tables),
                shown,
            )
        return plan
    assert reason is not None
    raise reason


def in_half(task: ShardingTask, names: Collection[str]) -> ShardingTask:
    """Return the task with some tables in fp16."""
    return task.with_values(precision=dict.fromkeys(names, "fp16"))


def with_precisions_of(plan: ShardingPlan, task: ShardingTask) -> ShardingPlan:
    """Return the plan with its tables in the precisions of the task, except replicas: fp32."""
    precision = {table.name: table.precision for table in task.tables}
    shards = (
        shard if shard.replicated else dataclasses.replace(shard, precision=precision[shard.table])
        for shard in plan.shards
    )
    return dataclasses.replace(plan, shards=tuple(shards))


def _choices(task: ShardingTask) -> Iterator[list[str]]:
    """Yield the tables in fp16: none, the fewest whose sizes may fit, then ever more of them."""
    yield []
    by_size = sorted(task.tables, key=task.topology.table_bytes, reverse=True)
    names = [table.name for table in by_size]
    memory = sum(task.topology.rank_memory_bytes)
    count = 1
    while count < len(names) and in_half(task, names[:count]).table_bytes > memory:
        count += 1
    step = 1
    while count < len(names):
        yield names[:count]
        count, step = count + step, 2 * step
    yield names
