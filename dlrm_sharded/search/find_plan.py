"""The whole search: construct plans, improve them by moves, and perturb what moves do not improve.

`find_from_scratch` builds a problem and searches it (`find_state`), `improve_within` starts from an
earlier plan, and `find_quickly` is a short search with which other plans are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, MAX_COLUMNS
from dlrm_sharded.search.build_problem import MAX_WIDTHS, build_problem
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.feasibility import why_infeasible
from dlrm_sharded.search.large_neighborhood import Rebuilder
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.slices import in_cheapest_slices
from dlrm_sharded.search.starts import (
    descended_slices,
    descended_starts,
    effort_for,
    objective_ms_of,
)
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import state_shards
from dlrm_sharded.search.stopping import Clock, StoppingRule

MIN_IMPROVEMENT = 1e-6
"""Smallest relative improvement of the objective for which a rebuilt plan is kept."""

DEVIATION = 0.002
"""Rebuilds go on from a plan that costs at most this much more than the best, relative to it: a
threshold as in record-to-record travel (Dueck 1993). Study: walks."""

GOOD_GAP = 0.003
"""A plan that costs at most this much more than the lower bound, relative to it, is good enough."""

ALL_WIDTHS = MAX_COLUMNS // COLUMN_MULTIPLE

REBUILT_STUCK = 1
"""Number of ranks without a move at which the descent after a rebuild ends."""


def find_state(
    problem: Problem, bound_ms: float, seed: int, stopping: StoppingRule
) -> State | None:
    """Return the best state found; None if none was found that fits the ranks' memory.

    Args:
        bound_ms: lower bound of the cost, from which the cuts of the first plans follow.
    """
    rng = np.random.default_rng(seed)
    states = descended_starts(in_cheapest_slices(problem), bound_ms, rng, stopping)
    if not states:  # slices need a little more memory
        states = descended_starts(problem, bound_ms, rng, stopping)
    if not states:
        return None
    states += descended_slices(states, rng, stopping)
    states.sort(key=objective_ms_of)
    effort = effort_for(problem, stopping)
    walked = [walk(state, rng, stopping) for state in states[: effort.walks]]
    best = min(walked, key=objective_ms_of)
    # Without the margin a walk gets further; with it, splits that do not pay are undone.
    plain = walk(best, rng, stopping, problem=best.problem.without_margin())
    best = min(best, walk(plain, rng, stopping, problem=best.problem), key=objective_ms_of)
    # When all splits are decided, the ranks are balanced at predicted costs.
    return walk(best, rng, stopping, problem=best.problem.without_margin(), splits=False)


def walk(
    start: State,
    rng: np.random.Generator,
    stopping: StoppingRule,
    *,
    problem: Problem | None = None,
    splits: bool = True,
) -> State:
    """Return the best state on a walk: a descent, then rebuilds of parts, each with a descent.

    Args:
        problem: the problem under whose costs to walk; the start's by default.
        splits: whether units may be cut into more pieces than they are in.
    """
    state = start.copy_for(problem or start.problem)
    if stopping.clock.is_over:
        return state
    descent = Descent(state, rng, stopping.clock, splits=splits)
    rebuilder = Rebuilder(state, rng, splits=splits)
    # The log reaches back to the best state so far, so undoing all of it restores that state.
    best_ms, failures = state.objective_ms, 0
    descent.run()
    if state.objective_ms < best_ms:
        best_ms = state.objective_ms
        state.log.clear()
    patience = stopping.patience * effort_for(state.problem, stopping).patience
    while failures < patience and not stopping.ends_at(best_ms):
        before = len(state.log)
        is_rebuilt = rebuilder.rebuild()
        if is_rebuilt:
            descent.run(max_stuck=REBUILT_STUCK)
        if is_rebuilt and state.objective_ms < best_ms * (1 - MIN_IMPROVEMENT):
            best_ms, failures = state.objective_ms, 0
            state.log.clear()
            continue
        failures += 1
        if not is_rebuilt or state.objective_ms > best_ms * (1 + DEVIATION):
            state.undo(before)
    state.undo()
    descent.run()
    if state.objective_ms > best_ms:
        state.undo()
    return state


def find_from_scratch(
    build: Callable[[int], Problem], seed: int, patience: int, clock: Clock
) -> tuple[State | None, Problem]:
    """Return the best state found in wide steps of columns, else in narrow ones, and its problem.

    Args:
        build: returns the problem with at most the given number of widths of a table.
    """
    problem = build(MAX_WIDTHS)
    state = _find_in_steps(problem, seed, patience, clock)
    if state is None and (problem.columns_per_step > COLUMN_MULTIPLE).any():
        problem = build(ALL_WIDTHS)
        state = _find_in_steps(problem, seed, patience, clock)
    return state, problem


def _find_in_steps(problem: Problem, seed: int, patience: int, clock: Clock) -> State | None:
    if why_infeasible(problem):
        return None
    # A bound that only plans with replicas reach must not keep the search going without them.
    bound_ms = lower_bound_ms(problem.costed, replicas=problem.replicas is not None)
    stopping = StoppingRule(clock, bound_ms * (1 + GOOD_GAP), patience)
    return find_state(problem, bound_ms, seed, stopping)


def find_quickly(
    costed: CostedTask, bound_ms: float, *, good_gap: float, clock: Clock
) -> ShardingPlan | None:
    """Return the best plan of a short search without constraints; None if it finds none."""
    problem = build_problem(costed, Constraints(), critical_path_share=0.0, split_error=0.0)
    state = find_state(problem, bound_ms, 0, StoppingRule(clock, bound_ms * (1 + good_gap), 0))
    return None if state is None else ShardingPlan(problem.world_size, state_shards(state))


def improve_within(state: State, budget: MoveBudget, seed: int, clock: Clock) -> None:
    """Improve a state that holds an earlier plan, one move after another, within a budget."""
    Descent(state, np.random.default_rng(seed), clock, budget=budget).run()
