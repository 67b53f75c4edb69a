"""The whole search: first plans, descents, large neighborhood search.

`find_state` searches from scratch, `improve_within` starts from an earlier plan, and `find_quickly`
is a short search for the least predicted cost, with which other plans are compared.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.search.build_problem import build_problem
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.cuts import UnitCut, cut_units, cuts_of
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.first_plan import first_plan, width_sorted_plan
from dlrm_sharded.search.large_neighborhood import Rebuilder
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.replication import replicas_fit, replicate, with_replicas
from dlrm_sharded.search.slices import (
    SLICE_COLUMNS,
    in_cheapest_slices,
    in_slices,
    in_slices_as,
    in_spread_slices,
)
from dlrm_sharded.search.smooth_objective import SHARP
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import state_shards
from dlrm_sharded.search.stopping import Clock, StoppingRule
from dlrm_sharded.search.uniform_starts import uniform_states, with_narrow_blocks

TARGETS = (1.0, 1.1, 1.3, 2.0)
"""Largest processing times of a piece, relative to the mean of the ranks in a plan that costs the
lower bound."""

FEW_PER_RANK = 4
"""Units per rank up to which single units decide what a rank costs."""

FEW, SMALL_TASK = 64, 200
"""Units of a task that are few on any number of ranks, and up to which twice as many per rank are,
as there is time for all starts."""

SAME_START = 1e-9
"""First plans whose costs differ by less, relative to them, are taken for the same."""

HOPELESS = 1.2
"""A start is left out if it costs so many times as much as the best plan so far."""

HOPELESS_SLICES = 1.5
"""The same factor for plans in slices."""

COLUMN_SHARES = (1.0, 0.5, 0.25)
"""Shares of a rank's time that column pieces of few units may take beside replicas."""

NEAR_BEST = 1.05
"""A second plan of few units is improved, too, if it costs less than so many times the best."""

NUM_KEPT = 4
"""Number of plans of few units that are kept to be tried in slices."""

FEW_UNITS_PATIENCE = 2
"""Factor of the patience for few units, where rebuilt plans differ most."""

MORE_WALKS = 4
"""Number of times that plans of few units are improved once more: each walk ends somewhere else."""

DEVIATION = 0.002
"""Rebuilds go on from a plan that costs so much more than the best, relative to it: a threshold as
in record-to-record travel (Dueck 1993)."""

MIN_IMPROVEMENT = 1e-6
"""Smallest relative improvement of the objective for which a rebuilt plan is kept."""

START_STUCK = 8
"""Number of ranks without a move at which the descent from a first plan ends. What keeps these from
a move usually holds the others up, too, and the best states are improved in full later."""

MAX_STUCK = 1
"""Number of ranks without a move at which the descent after a rebuild ends."""


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
    good_ms = (bound_ms - problem.weights.hidden_ms) * (1 + stopping.good_gap)
    bounds_ms = (bound_ms,) if split_bound_ms in (None, bound_ms) else (bound_ms, split_bound_ms)
    extras = stopping.patience > 0
    whole, problem = problem, in_cheapest_slices(problem)
    states = _first_plans(problem, bounds_ms, good_ms, rng, stopping, extras=extras)
    if not states and problem is not whole:  # slices need a little more memory
        problem = whole
        states = _first_plans(problem, bounds_ms, good_ms, rng, stopping, extras=extras)
    if not states:
        return None
    few_units = has_few_units(problem)
    # Slices of few units come first, as the walks take what time is left.
    if extras and few_units and (sliced := _in_slices(states, good_ms, rng, stopping)):
        states.insert(0, sliced)
    near_ms = NEAR_BEST * states[0].objective_ms
    near = [state for state in states if state.objective_ms < near_ms][:2]
    others = states[len(near) :]
    states = [*_walk(near, good_ms, rng, stopping), *others]
    best = min(states, key=_objective_ms)
    # Without the margin a search gets further; with it, splits go that do not pay.
    if best.objective_ms > good_ms and not stopping.clock.is_over:
        plain = problem.without_margin()
        for other in _first_plans(plain, bounds_ms, good_ms, rng, stopping, extras=False)[:1]:
            if other.objective_ms > HOPELESS * best.objective_ms:
                continue
            _improve(other, good_ms, rng, stopping, splits=True)
            other = other.copy_for(problem)
            _improve(other, good_ms, rng, stopping, splits=True)
            states.append(other)
            best = min(states, key=_objective_ms)
    if extras and not few_units and (sliced := _in_slices(states, good_ms, rng, stopping)):
        _improve(sliced, good_ms, rng, stopping, splits=True)
        best = sliced
    for _ in range(MORE_WALKS if extras and few_units else 0):
        if best.objective_ms <= good_ms or stopping.clock.is_over:
            break
        best = min(best, *_walk(near, good_ms, rng, stopping), key=_objective_ms)
    return _balanced(best, good_ms, rng, stopping)


def improve_under(problem: Problem, start: State, seed: int, stopping: StoppingRule) -> State:
    """Return the best state found near one of the same units and groups under other weights."""
    rng = np.random.default_rng(seed)
    state = start.copy_for(in_slices_as(problem, start.problem))
    _improve(state, 0.0, rng, stopping, splits=True)
    return _balanced(state, 0.0, rng, stopping)


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


def has_few_units(problem: Problem) -> bool:
    """Return whether single units decide what a rank costs, so that all of them matter."""
    return are_few(problem.num_units, problem.world_size)


def are_few(num_units: int, world_size: int) -> bool:
    """Return whether units are few for so many ranks; see `FEW_PER_RANK` and `FEW`."""
    few = FEW_PER_RANK * world_size
    return num_units <= few or num_units <= max(FEW, min(2 * few, SMALL_TASK))


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


def _in_slices(
    states: list[State], good_ms: float, rng: np.random.Generator, stopping: StoppingRule
) -> State | None:
    """Return the best state found with some state's pieces in slices; None if none is better."""
    best = first = min(states, key=_objective_ms)
    few_units = has_few_units(best.problem)
    ways: list[Callable[[State, int], State | None]] = [in_slices]
    if few_units:
        ways.append(in_spread_slices)
        ways += [functools.partial(in_spread_slices, blocks=kept) for kept in ("narrow", "none")]
    for columns in SLICE_COLUMNS if first.problem.has_crowding else ():
        if best.objective_ms <= good_ms or stopping.clock.is_over:
            break
        for way in ways:
            sliced = [other for state in states if (other := way(state, columns)) is not None]
            if not sliced:
                continue
            other = min(sliced, key=_objective_ms)
            if few_units and other.objective_ms < HOPELESS_SLICES * best.objective_ms:
                Descent(other, rng, stopping.clock).run(max_stuck=START_STUCK)
            best = min(best, other, key=_objective_ms)
    is_better = best.objective_ms < first.objective_ms * (1 - MIN_IMPROVEMENT)
    return best if is_better else None


def _objective_ms(state: State) -> float:
    return state.objective_ms


def _first_plans(
    problem: Problem,
    bounds_ms: tuple[float, ...],
    good_ms: float,
    rng: np.random.Generator,
    stopping: StoppingRule,
    *,
    extras: bool,
) -> list[State]:
    """Descend from each first plan, and return the best states, the very best first.

    Args:
        extras: whether to start from uniform plans, too, as far as they are not hopeless.
    """
    found: list[State] = []
    begun: list[tuple[float, float]] = []  # the objectives and all loads of first plans
    few_units = has_few_units(problem)

    def is_over() -> bool:
        return bool(found) and (found[0].objective_ms <= good_ms or stopping.clock.is_over)

    def descend(state: State) -> None:
        costs = state.objective_ms, float(state.load.sum())
        if any(np.allclose(costs, others, rtol=SAME_START, atol=0.0) for others in begun):
            return  # others led to the same start
        begun.append(costs)
        Descent(state, rng, stopping.clock).run(max_stuck=START_STUCK)
        if not any(math.isclose(state.objective_ms, other.objective_ms) for other in found):
            found.append(state)
        found.sort(key=_objective_ms)
        del found[NUM_KEPT if few_units else 1 :]

    def cheapest_first(states: Iterator[State]) -> Iterator[State]:
        if not few_units:  # their first plans take long, too
            return states
        made = itertools.takewhile(lambda _: not is_over(), states)
        return iter(sorted(made, key=_objective_ms))

    tried: set[tuple[UnitCut, ...]] = set()
    starts = _first_states(problem, bounds_ms, tried)
    if (first := next(starts, None)) is None:
        return found
    descend(first)
    # The first plan decides whether others have replicas at once: moves come later.
    other = first.copy_for(problem)
    is_replicated = replicate(other)
    descend(other)
    if is_replicated and found[0] is other:
        starts = map(_replicated, starts)
    starts = cheapest_first(starts)
    while not is_over() and (state := next(starts, None)) is not None:
        descend(state)
    if not extras:
        return found
    starts = cheapest_first(_extra_states(tuple(found), tried))
    while not is_over() and (state := next(starts, None)) is not None:
        if state.objective_ms < HOPELESS * found[0].objective_ms:
            descend(state)
    return found


def _replicated(state: State) -> State:
    replicate(state)
    return state


def _extra_states(states: tuple[State, ...], tried: set[tuple[UnitCut, ...]]) -> Iterator[State]:
    """Yield states with units in the same kinds of blocks, and of few units others, too.

    Args:
        states: where units are that have no such blocks. On nearly full ranks these decide which
            blocks there is room for.
        tried: cuts that were tried before.
    """
    state, problem = states[0], states[0].problem
    few_units = has_few_units(problem)
    for base in states:
        yield from uniform_states(base.copy_for(problem), all_kinds=few_units)
    if not few_units:
        return
    even = tuple(cut_units(problem, 0.0, rows=False, replicas=False))
    others = [with_replicas(problem, even), with_replicas(problem, cuts_of(state))]
    # Beside replicas, there is less time for columns than where all tables are cut.
    mean_ms = problem.mean_processing_ms(state.objective_ms)
    for share in COLUMN_SHARES:
        columns = cut_units(problem, share * mean_ms, rows=False, replicas=False)
        others.append(with_replicas(problem, columns))
    for cuts in (even, *others, *with_narrow_blocks(problem, even)):
        if cuts not in tried and (first := first_plan(problem, cuts)) is not None:
            yield first


def _first_states(
    problem: Problem, bounds_ms: tuple[float, ...], tried: set[tuple[UnitCut, ...]]
) -> Iterator[State]:
    """Yield first plans, and where that counts others with similar widths on a rank.

    Args:
        tried: cuts that were tried; those of these plans are added.
    """
    for cuts in _first_cuts(problem, bounds_ms):
        if cuts in tried:  # different targets often lead to the same cuts
            continue
        tried.add(cuts)
        if (state := first_plan(problem, cuts)) is not None:
            yield state
        if problem.has_crowding and (state := width_sorted_plan(problem, cuts)) is not None:
            yield state


def _first_cuts(problem: Problem, bounds_ms: tuple[float, ...]) -> Iterator[tuple[UnitCut, ...]]:
    """Yield cuts for ever higher targets, then without row blocks, then with all possible ones."""
    *others_ms, split_bound_ms = bounds_ms
    bound_ms = (others_ms or bounds_ms)[0]
    mean_ms = problem.mean_processing_ms(bound_ms)
    split_mean_ms = problem.mean_processing_ms(split_bound_ms)
    for target in TARGETS:
        cuts = tuple(cut_units(problem, mean_ms * target))
        if not replicas_fit(problem, cuts):
            cuts = tuple(cut_units(problem, split_mean_ms * target, replicas=False))
        yield cuts
    yield tuple(cut_units(problem, mean_ms, rows=False))
    if has_few_units(problem):
        yield tuple(cut_units(problem, 0.0, columns=False))


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
    descent.run()
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
    Descent(state, rng, stopping.clock, splits=splits, num_squarings=SHARP).run()
    if state.objective_ms > best_ms:
        state.undo()
