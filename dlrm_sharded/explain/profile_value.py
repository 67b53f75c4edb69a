"""Say what measured access profiles would be worth to a task whose tables lack them."""

from __future__ import annotations

import time

import numpy as np

from dlrm_sharded.accesses.profiles import SKEWS, histograms_by_skew
from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import ProfileValue
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.find_plan import find_quickly
from dlrm_sharded.search.stopping import Clock

NUM_DRAWN = 4
"""Number of times that every table is given one of the skews."""

SEARCHES_S = 1.0
"""Time limit in s after which no further search starts."""

MAX_SIZE = 1600
"""Largest product of tables and ranks for which searches are short enough."""

GOOD_GAP = 0.003
"""Gap to the lower bound at which a search ends."""


def value_profiles(plan: ShardingPlan, task: ShardingTask, costed: CostedTask) -> ProfileValue:
    """Return the range of a plan's cost, and what a search gains from profiles, in about a second.

    The gain compares short searches that know the profiles with one that assumes them, as the
    default sharder does, even if another sharder made the plan.

    Args:
        task: at least one table has no reuse histogram.
        costed: the same task, with the costs by which its plans are predicted.
    """
    unknown = [i for i, table in enumerate(task.tables) if table.reuse_histogram is None]
    costs = [
        costed.with_task(_with_skews(task, dict.fromkeys(unknown, skew))).predict(plan).cost_ms
        for skew in range(len(SKEWS))
    ]
    return ProfileValue(len(unknown), min(costs), max(costs), _gain(task, unknown, costed))


def _gain(task: ShardingTask, unknown: list[int], costed: CostedTask) -> float | None:
    if len(task.tables) * task.topology.world_size > MAX_SIZE:
        return None
    clock = Clock(time.perf_counter() + SEARCHES_S)
    uninformed = _found(costed.with_task(task), clock)
    rng = np.random.default_rng(0)
    gains: list[float] = []
    while uninformed is not None and len(gains) < NUM_DRAWN and not clock.is_over:
        drawn = rng.choice(len(SKEWS), size=len(unknown), p=list(SKEWS.values())).tolist()
        known = costed.with_task(_with_skews(task, dict(zip(unknown, drawn, strict=True))))
        best = _found(known, clock)
        if best is None:
            break
        uninformed_ms = known.predict(uninformed).cost_ms
        # a search that knows more may still find less in its time
        gains.append(1 - min(known.predict(best).cost_ms / uninformed_ms, 1.0))
    return float(np.mean(gains)) if gains else None


def _with_skews(task: ShardingTask, skews: dict[int, int]) -> ShardingTask:
    """Return the task with histograms of skews for some tables, both given by their indices."""
    histograms = {}
    for place, skew in skews.items():
        table = task.tables[place]
        by_skew = histograms_by_skew(table.num_embeddings, task.batch_size * table.pooling_factor)
        histograms[table.name] = by_skew[skew]
    return task.with_values(reuse_histogram=histograms)


def _found(costed: CostedTask, clock: Clock) -> ShardingPlan | None:
    return find_quickly(costed, lower_bound_ms(costed), good_gap=GOOD_GAP, clock=clock)
