"""Searches on a cost model that only predicts plans, and tells neither prices nor a bound.

Each round takes prices near the best plan so far (`local_prices.py`), searches under them as under
those of an additive model, and has the plan found predicted. At the end, parts of the best plan are
rebuilt again and again under the last prices, and the model decides which of these plans to keep.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.find_plan import MAX_STUCK, find_state
from dlrm_sharded.search.large_neighborhood import Rebuilder
from dlrm_sharded.search.local_prices import local_problem
from dlrm_sharded.search.predictions import Predictions, Shards, loads_of, parts_ms
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.replication import replicate
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import load_plan, state_shards
from dlrm_sharded.search.stopping import StoppingRule

log = logging.getLogger(__name__)

MAX_ROUNDS = 4
"""Largest number of times that prices are taken near a plan."""

MIN_GAIN = 1e-4
"""Smallest relative improvement by which a plan leads to further rounds or rebuilds."""

NUM_REBUILDS = 8
"""Number of rebuilt plans that are predicted together."""


def find_by_prediction(
    problem: Problem,
    first: Shards,
    predictions: Predictions,
    *,
    split_error: float,
    seed: int,
    stopping: StoppingRule,
) -> Shards:
    """Return the shards of the plan of the least predicted value that was found.

    Args:
        problem: what plans may be; its prices do not count.
        first: the plan to begin with.
        split_error: see `build_problem`.

    Raises:
        ConfigError: the cost model fails.
    """
    share = problem.weights.critical_path_share
    best, near, cost = first, problem, predictions.at_once([first])[0]
    for other in _uniform_plans(problem, first):
        [predicted] = predictions.at_once([other])
        if predicted.weighed_ms(share) < cost.weighed_ms(share):
            best, cost = other, predicted
    for number in range(MAX_ROUNDS if problem.world_size > 1 else 0):
        try:
            near = local_problem(_state(problem, best), predictions, split_error)
        except TimeoutError:
            if not number:
                log.warning(
                    "sharder.time_budget_s is over before the cost model has predicted what "
                    "neuroshard asks about a first plan; that plan is kept"
                )
            return best
        found = find_state(near, _least_ms(near), seed, stopping)
        if found is None:
            break
        shards = state_shards(found)
        [predicted] = predictions.at_once([shards])
        before_ms, after_ms = cost.weighed_ms(share), predicted.weighed_ms(share)
        if after_ms < before_ms:
            best, cost = shards, predicted
        if after_ms > before_ms * (1 - MIN_GAIN):
            break
    if near is problem:
        return best
    best, cost = _rebuilt(near, best, cost, predictions, seed, stopping, splits=True)
    # It is decided now which splits are made, as in `find_state`.
    plain = near.without_margin()
    return _rebuilt(plain, best, cost, predictions, seed, stopping, splits=False)[0]


def _rebuilt(
    problem: Problem,
    best: Shards,
    cost: PlanCost,
    predictions: Predictions,
    seed: int,
    stopping: StoppingRule,
    *,
    splits: bool,
) -> tuple[Shards, PlanCost]:
    """Rebuild parts of a plan until that has improved none for a while.

    Args:
        splits: whether units may be cut in another way.
    """
    rng, failures = np.random.default_rng(seed), 0
    share = problem.weights.critical_path_share
    while failures < stopping.patience and not stopping.clock.is_over:
        state = _state(problem, best)
        # Prices are of differences: the ranks begin with what the model predicts.
        [parts] = parts_ms([cost], problem.world_size)
        state.add_load(loads_of(parts, problem.weights) - state.load)
        plans = [plan for plan in _rebuilds(state, rng, stopping, splits) if plan != best]
        failures += 1
        for plan, predicted in zip(plans, predictions.at_once(plans), strict=True):
            if predicted.weighed_ms(share) < cost.weighed_ms(share) * (1 - MIN_GAIN):
                best, cost, failures = plan, predicted, 0
    return best, cost


def _rebuilds(
    state: State, rng: np.random.Generator, stopping: StoppingRule, splits: bool
) -> list[Shards]:
    """Return different plans near that of a state: the nearest local optimum, and rebuilt ones."""
    descent = Descent(state, rng, stopping.clock, splits=splits)
    rebuilder = Rebuilder(state, rng, splits=splits)
    descent.run()
    plans = {state_shards(state): None}
    if splits and replicate(state):  # rebuilds make single replicas, which may not pay alone
        descent.run()
        plans[state_shards(state)] = None
    for _ in range(NUM_REBUILDS - 1):
        state.undo()
        if rebuilder.rebuild():
            descent.run(max_stuck=MAX_STUCK)
            plans[state_shards(state)] = None
    return list(plans)


def _uniform_plans(problem: Problem, first: Shards) -> Iterator[Shards]:
    """Yield the plan with all units in blocks of one kind, where one group has room for them.

    Moves of one unit lead to no plan that saves an exchange only when its last unit is gone.
    """
    for kind in problem.blocks:
        state = _state(problem, first)
        for unit in np.flatnonzero(kind.possible).tolist():
            for rank in list(state.widths[unit]):
                state.set_width(unit, rank, 0)
            state.set_group(unit, kind.groups.start)
        if (state.free_bytes >= 0).all() and (state.separated_count <= 1).all():
            yield state_shards(state)


def _state(problem: Problem, shards: Shards) -> State:
    state = State(problem)
    is_loaded = load_plan(state, ShardingPlan(problem.world_size, shards).shards_by_table())
    assert is_loaded, "a state has no place for a plan of the same constraints"
    return state


def _least_ms(problem: Problem) -> float:
    """Return what the units cost a rank at least on average, each in its cheapest layout."""
    whole = problem.whole_shape
    least_ms = problem.processing_ms(problem.load[whole]) / problem.world_size
    least_ms += problem.shared_ms[whole]
    for kind in problem.blocks:
        in_blocks_ms = problem.processing_ms(kind.load) * kind.group_size / problem.world_size
        in_blocks_ms += kind.shared_ms
        least_ms = np.where(kind.possible, np.minimum(least_ms, in_blocks_ms), least_ms)
    return float(least_ms.sum())
