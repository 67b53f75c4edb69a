"""Plans of a task that are worth measuring: the ones that some prices would choose."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from dlrm_sharded.calibration.task_plans import TaskPlans
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.fitting.confidence import PART_SPREAD
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder
from dlrm_sharded.sharders.search import SearchSharder

NUM_PRICES = 6
"""Prices under which the search plans: those of the prior, and others that it deems possible."""

SEARCH_S = 1.5
"""Time of one search."""


def plans_to_measure(task: ShardingTask, context: RunContext) -> TaskPlans:
    """Return plans of a task: of the heuristics, and of a search under prices that are possible.

    Prices are drawn from the prior of a calibration's fit. Where the plans differ, measurements
    decide between them.

    Raises:
        InfeasibleTaskError: no plan fits the ranks' memory.
    """
    prior = shipped_prior(context)
    plans = [_sharder(context, prices).shard(task) for prices in _possible(prior)]
    for weight in WEIGHTS:
        with contextlib.suppress(InfeasibleTaskError):
            plans.append(GreedySharder(weight).shard(task))
    return TaskPlans(task, tuple(dict.fromkeys(plans)))


def _sharder(context: RunContext, prices: LearnedCostModel) -> Sharder:
    return SearchSharder(SharderContext(context, prices), time_budget_s=SEARCH_S)


def _possible(prior: LearnedCostModel) -> Iterator[LearnedCostModel]:
    """Yield the prior, and models whose parts differ from it as it deems likely."""
    yield prior
    rng = np.random.default_rng(0)
    for _ in range(NUM_PRICES - 1):
        logs = PART_SPREAD * rng.standard_normal((2, prior.compute.num_parts))
        yield dataclasses.replace(prior, compute=prior.compute.scaled(*np.exp(logs)))
