"""The whole search: first plans, descents, large neighborhood search.

`find_state` searches from scratch, `improve_within` starts from an earlier plan, and `find_quickly`
is a short search for the least predicted cost, with which other plans are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.search.build_problem import build_problem
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.cuts import UnitCut, cut_units
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.first_plan import first_plan, width_sorted_plan
from dlrm_sharded.search.large_neighborhood import Rebuilder
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.replication import replicate
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import state_shards
from dlrm_sharded.search.stopping import Clock, StoppingRule

TARGETS = (1.0, 1.1, 1.3, 2.0)
"""Largest processing times of a piece, relative to the mean of the ranks in a plan that costs the
lower bound."""

MANY_UNITS = 4
"""Units per rank from which on no first plan is made of row blocks alone."""

MIN_IMPROVEMENT = 1e-6
"""Smallest relative improvement of the objective for which a rebuilt plan is kept."""

MAX_STUCK = 1
"""Number of ranks without a move at which the descent after a rebuild ends."""


def find_state(
    problem: Problem, bound_ms: float, seed: int, stopping: StoppingRule
) -> State | None:
    """Return the best state found; None if none was found that fits the ranks' memory.

    Args:
        bound_ms: lower bound of the objective.
    """
    rng = np.random.default_rng(seed)
    good_ms = bound_ms * (1 + stopping.good_gap)
    best = _best_first_plan(problem, bound_ms, good_ms, rng, stopping)
    if best is None:
        return None
    _improve(best, good_ms, rng, stopping, splits=True)
    plain = problem.without_margin()
    # Without the margin a search gets further; with it, splits go that do not pay.
    if best.objective_ms > good_ms and not stopping.clock.is_over:
        other = _best_first_plan(plain, bound_ms, good_ms, rng, stopping)
        if other is not None:
            _improve(other, good_ms, rng, stopping, splits=True)
            other = other.copy_for(problem)
            _improve(other, good_ms, rng, stopping, splits=True)
            best = min(best, other, key=lambda state: state.objective_ms)
    # It is decided now which splits are made; ranks are balanced at predicted costs.
    best = best.copy_for(plain)
    _improve(best, good_ms, rng, stopping, splits=False)
    return best


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


def _best_first_plan(
    problem: Problem,
    bound_ms: float,
    good_ms: float,
    rng: np.random.Generator,
    stopping: StoppingRule,
) -> State | None:
    """Descend from each first plan, and return the best state."""
    best: State | None = None
    tried: set[tuple[UnitCut, ...]] = set()
    with_replicas: bool | None = None  # not known before the first plan
    for cuts in _first_cuts(problem, bound_ms):
        if best is not None and (best.objective_ms <= good_ms or stopping.clock.is_over):
            break
        if cuts in tried:  # different targets often lead to the same cuts
            continue
        tried.add(cuts)
        for state in _first_states(problem, cuts):
            if with_replicas:
                replicate(state)
            Descent(state, rng, stopping.clock).run()
            if best is None or state.objective_ms < best.objective_ms:
                best = state
            if with_replicas is None:
                # The first plan decides: descents take most of the time, and moves come later.
                other = state.copy_for(problem)
                with_replicas = replicate(other)
                Descent(other, rng, stopping.clock).run()
                with_replicas = with_replicas and other.objective_ms < best.objective_ms
                best = other if with_replicas else best
    return best


def _first_states(problem: Problem, cuts: tuple[UnitCut, ...]) -> Iterator[State]:
    """Yield the first plan for these cuts, and one with similar widths on a rank if that counts."""
    state = first_plan(problem, cuts)
    if state is not None:
        yield state
    if problem.has_crowding and (state := width_sorted_plan(problem, cuts)) is not None:
        yield state


def _first_cuts(problem: Problem, bound_ms: float) -> Iterator[tuple[UnitCut, ...]]:
    """Yield cuts for ever higher targets, then without row blocks, then with all possible ones."""
    mean_ms = problem.mean_processing_ms(bound_ms)
    for target in TARGETS:
        yield tuple(cut_units(problem, mean_ms * target))
    yield tuple(cut_units(problem, mean_ms, rows=False))
    if problem.num_units <= MANY_UNITS * problem.world_size:
        yield tuple(cut_units(problem, 0.0, columns=False))


def _improve(
    state: State,
    good_ms: float,
    rng: np.random.Generator,
    stopping: StoppingRule,
    *,
    splits: bool,
) -> None:
    """Descend, then rebuild parts and descend again; go back unless that led to a better plan."""
    descent = Descent(state, rng, stopping.clock, splits=splits)
    descent.run()
    rebuilder = Rebuilder(state, rng, splits=splits)
    # The log reaches back to the best state so far, so undoing all of it restores that state.
    state.log.clear()
    best_ms, failures = state.objective_ms, 0
    while failures < stopping.patience and best_ms > good_ms and not stopping.clock.is_over:
        if rebuilder.rebuild():
            descent.run(max_stuck=MAX_STUCK)
            if state.objective_ms < best_ms * (1 - MIN_IMPROVEMENT):
                best_ms, failures = state.objective_ms, 0
                state.log.clear()
                continue
        state.undo()
        failures += 1
