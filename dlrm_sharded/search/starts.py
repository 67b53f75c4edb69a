"""Where searches from scratch start: states near first plans, and states with pieces in slices.

All of them have descended; `find_plan` goes on from the best.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from dlrm_sharded.search.cuts import UnitCut, cut_units, cuts_of
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.first_plan import first_plan, width_sorted_plan
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.replication import replicas_fit, replicate, with_replicas
from dlrm_sharded.search.slices import SLICE_COLUMNS, in_slices, in_spread_slices
from dlrm_sharded.search.state import State
from dlrm_sharded.search.stopping import StoppingRule
from dlrm_sharded.search.uniform_starts import uniform_states, with_narrow_blocks

TARGETS = (1.0, 1.1, 1.3, 2.0)
"""Largest processing times of a piece, relative to the mean of the ranks in a plan that costs the
lower bound."""

FEW_PER_RANK = 4
"""Units per rank up to which single units decide what a rank costs."""

FEW, SMALL_TASK = 64, 200
"""Units of a task that are few on any number of ranks, and up to which twice as many per rank are,
as there is time for all starts."""

Costs = tuple[float, float]
"""The objective of a state, and the sum of all loads."""

SAME_START = 1e-9
"""First plans whose costs differ by less, relative to them, are taken for the same."""

HOPELESS = 1.2
"""A start is left out if it costs so many times as much as the best plan so far."""

HOPELESS_SLICES = 1.5
"""The same factor for plans in slices."""

COLUMN_SHARES = (1.0, 0.5, 0.25)
"""Shares of a rank's time that column pieces of few units may take beside replicas."""

NUM_KEPT = 4
"""Number of plans of few units that are kept to be tried in slices."""

MIN_IMPROVEMENT = 1e-6
"""Smallest relative improvement of the objective for which a rebuilt plan is kept."""

START_STUCK = 8
"""Number of ranks without a move at which the descent from a first plan ends. What keeps these from
a move usually holds the others up, too, and the best states are improved in full later."""


def has_few_units(problem: Problem) -> bool:
    """Return whether single units decide what a rank costs, so that all of them matter."""
    return are_few(problem.num_units, problem.world_size)


def are_few(num_units: int, world_size: int) -> bool:
    """Return whether units are few for so many ranks; see `FEW_PER_RANK` and `FEW`."""
    few = FEW_PER_RANK * world_size
    return num_units <= few or num_units <= max(FEW, min(2 * few, SMALL_TASK))


def objective_ms_of(state: State) -> float:
    return state.objective_ms


def best_starts(
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
    begun: list[Costs] = []
    few_units = has_few_units(problem)

    def is_over() -> bool:
        return bool(found) and (found[0].objective_ms <= good_ms or stopping.clock.is_over)

    def descend(state: State) -> None:
        if not _is_new(state, begun):
            return
        Descent(state, rng, stopping.clock).run(max_stuck=START_STUCK)
        if not any(math.isclose(state.objective_ms, other.objective_ms) for other in found):
            found.append(state)
        found.sort(key=objective_ms_of)
        del found[NUM_KEPT if few_units else 1 :]

    def cheapest_first(states: Iterator[State]) -> Iterator[State]:
        if not few_units:  # their first plans take long, too
            return states
        made = itertools.takewhile(lambda _: not is_over(), states)
        return iter(sorted(made, key=objective_ms_of))

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
    narrow = tuple(with_narrow_blocks(problem, even))
    # Where row blocks of most tables leave no room for columns, the smallest have replicas.
    others += [with_replicas(problem, cuts) for cuts in narrow[:1]]
    for cuts in (even, *others, *narrow):
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


def starts_in_slices(
    states: list[State], good_ms: float, rng: np.random.Generator, stopping: StoppingRule
) -> list[State]:
    """Return the best states found with some state's pieces in slices, for each width of slices.

    They come in order of their objective, and only if one of them is better than all states.
    """
    best_ms = first_ms = min(state.objective_ms for state in states)
    problem, found, begun = states[0].problem, list[State](), list[Costs]()
    few_units = has_few_units(problem)
    ways: list[Callable[[State, int], State | None]] = [in_slices]
    if few_units:
        ways.append(in_spread_slices)
        ways += [functools.partial(in_spread_slices, blocks=kept) for kept in ("narrow", "none")]
    for columns in SLICE_COLUMNS if problem.has_crowding else ():
        if best_ms <= good_ms or stopping.clock.is_over:
            break
        in_columns = []
        for way in ways:
            sliced = [other for state in states if (other := way(state, columns)) is not None]
            if not sliced:
                continue
            other = min(sliced, key=objective_ms_of)
            if not _is_new(other, begun):
                continue
            if few_units and other.objective_ms < HOPELESS_SLICES * best_ms:
                Descent(other, rng, stopping.clock).run(max_stuck=START_STUCK)
            in_columns.append(other)
            best_ms = min(best_ms, other.objective_ms)
        found += sorted(in_columns, key=objective_ms_of)[:1]
    is_better = best_ms < first_ms * (1 - MIN_IMPROVEMENT)
    return sorted(found, key=objective_ms_of) if is_better else []


def _is_new(state: State, begun: list[Costs]) -> bool:
    """Return whether no earlier start had the costs of a state, and note these."""
    costs = state.objective_ms, float(state.load.sum())
    if any(np.allclose(costs, others, rtol=SAME_START, atol=0.0) for others in begun):
        return False
    begun.append(costs)
    return True
