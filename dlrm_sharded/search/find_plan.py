"""The whole search: first plans, descents, large neighborhood search.

`find_state` searches from scratch, `improve_within` starts from an earlier plan, and `find_quickly`
is a short search for the least predicted cost, with which other plans are compared.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.search.build_problem import build_problem
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.large_neighborhood import Rebuilder
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.slices import in_cheapest_slices
from dlrm_sharded.search.smooth_objective import SHARP
from dlrm_sharded.search.starts import (
    HOPELESS,
    MIN_IMPROVEMENT,
    best_starts,
    has_few_units,
    objective_ms_of,
    starts_in_slices,
)
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import state_shards
from dlrm_sharded.search.stopping import Clock, StoppingRule

NEAR_BEST = 1.05
"""A second plan of few units is improved, too, if it costs less than so many times the best."""

FEW_UNITS_PATIENCE = 2
"""Factor of the patience for few units, where rebuilt plans differ most."""

MORE_WALKS = 4
"""Number of times that plans of few units are improved once more: each walk ends somewhere else."""

DEVIATION = 0.002
"""Rebuilds go on from a plan that costs so much more than the best, relative to it: a threshold as
in record-to-record travel (Dueck 1993)."""

MAX_STUCK = 1
"""Number of ranks without a move at which the descent after a rebuild ends."""

MAX_CHAINED = 4
"""Number of the fullest ranks from which chains are tried where a search ends; before that, only
from the fullest one, as those of a rank take as long as a dozen single moves."""


def find_state(
    problem: Problem,
    bound_ms: float,
    seed: int,
    stopping: StoppingRule,
    *,
    split_bound_ms: float | None = None,
) -> State | None:
    """Return the best state found; None if none was found that fits the ranks' memory.

    Args:
        bound_ms: lower bound of the cost; no search goes on where it is met.
        split_bound_ms: lower bound of plans without replicas, for cuts where these find no room.
    """
    rng = np.random.default_rng(seed)
    good_ms = bound_ms * (1 + stopping.good_gap)
    bounds_ms = (bound_ms,) if split_bound_ms in (None, bound_ms) else (bound_ms, split_bound_ms)
    extras = stopping.patience > 0
    whole, problem = problem, in_cheapest_slices(problem)
    states = best_starts(problem, bounds_ms, good_ms, rng, stopping, extras=extras)
    if not states and problem is not whole:  # slices need a little more memory
        problem = whole
        states = best_starts(problem, bounds_ms, good_ms, rng, stopping, extras=extras)
    if not states:
        return None
    few_units = has_few_units(problem)
    # Slices of few units come first, as the walks take what time is left.
    if extras and few_units:
        states = sorted(
            [*starts_in_slices(states, good_ms, rng, stopping), *states], key=objective_ms_of
        )
    near_ms = NEAR_BEST * states[0].objective_ms
    near = [state for state in states if state.objective_ms < near_ms][:2]
    others = states[len(near) :]
    states = [*_walk(near, good_ms, rng, stopping), *others]
    best = min(states, key=objective_ms_of)
    # Without the margin a search gets further; with it, splits go that do not pay.
    if best.objective_ms > good_ms and not stopping.clock.is_over:
        plain = problem.without_margin()
        for other in best_starts(plain, bounds_ms, good_ms, rng, stopping, extras=False)[:1]:
            if other.objective_ms > HOPELESS * best.objective_ms:
                continue
            _improve(other, good_ms, rng, stopping, splits=True)
            other = other.copy_for(problem)
            _improve(other, good_ms, rng, stopping, splits=True)
            states.append(other)
            best = min(states, key=objective_ms_of)
    if extras and not few_units:
        for sliced in starts_in_slices(states, good_ms, rng, stopping)[:1]:
            _improve(sliced, good_ms, rng, stopping, splits=True)
            best = sliced
    for _ in range(MORE_WALKS if extras and few_units else 0):
        if best.objective_ms <= good_ms or stopping.clock.is_over:
            break
        best = min(best, *_walk(near, good_ms, rng, stopping), key=objective_ms_of)
    return _balanced(best, good_ms, rng, stopping)


def _walk(
    starts: list[State], good_ms: float, rng: np.random.Generator, stopping: StoppingRule
) -> list[State]:
    """Return copies of states, each improved."""
    states = [state.copy_for(state.problem) for state in starts]
    for state in states:
        _improve(state, good_ms, rng, stopping, splits=True)
    return states


def _balanced(
    state: State, good_ms: float, rng: np.random.Generator, stopping: StoppingRule
) -> State:
    """Return a state whose ranks are balanced at predicted costs, when all splits are decided."""
    state = state.copy_for(state.problem.without_margin())
    _improve(state, good_ms, rng, stopping, splits=False)
    return state


def find_quickly(
    priced: PricedTask, bound_ms: float, *, good_gap: float, clock: Clock
) -> ShardingPlan | None:
    """Return the best plan of a short search without constraints; None if it finds none."""
    problem = build_problem(priced, Constraints(), critical_path_share=0.0, split_error=0.0)
    state = find_state(problem, bound_ms, 0, StoppingRule(0, good_gap, clock))
    return None if state is None else ShardingPlan(problem.world_size, state_shards(state))


def improve_within(state: State, budget: MoveBudget, seed: int, clock: Clock) -> None:
    """Improve a state that holds an earlier plan, one move after another, within a budget."""
    Descent(state, np.random.default_rng(seed), clock, budget=budget).run()


def _improve(
    state: State,
    good_ms: float,
    rng: np.random.Generator,
    stopping: StoppingRule,
    *,
    splits: bool,
) -> None:
    """Descend, then rebuild parts and descend again, and end with the best plan on the way."""
    if stopping.clock.is_over:
        return
    descent = Descent(state, rng, stopping.clock, splits=splits)
    rebuilder = Rebuilder(state, rng, splits=splits)
    # The log reaches back to the best state so far, so undoing all of it restores that state.
    state.log.clear()
    best_ms, failures = state.objective_ms, 0
    descent.run(max_chained=1)
    if state.objective_ms < best_ms:
        best_ms = state.objective_ms
        state.log.clear()
    patience = stopping.patience * (FEW_UNITS_PATIENCE if has_few_units(state.problem) else 1)
    while failures < patience and best_ms > good_ms and not stopping.clock.is_over:
        before = len(state.log)
        if rebuilder.rebuild():
            descent.run(max_stuck=MAX_STUCK)
            if state.objective_ms < best_ms * (1 - MIN_IMPROVEMENT):
                best_ms, failures = state.objective_ms, 0
                state.log.clear()
                continue
            if state.objective_ms < best_ms * (1 + DEVIATION):
                failures += 1
                continue
        state.undo(before)
        failures += 1
    state.undo()
    # What pays for the fullest rank alone may not seem to, as the others are nearly as full.
    last = Descent(state, rng, stopping.clock, splits=splits, num_squarings=SHARP)
    last.run(max_chained=MAX_CHAINED)
    if state.objective_ms > best_ms:
        state.undo()
