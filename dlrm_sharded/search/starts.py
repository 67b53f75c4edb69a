"""Construct: plans from many kinds of cuts; the cheapest descend, and are tried in slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.search.cuts import UnitCut, cut_units
from dlrm_sharded.search.descent import Descent
from dlrm_sharded.search.first_plan import first_plan, placed_plan
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.replication import replicate, with_replicas
from dlrm_sharded.search.slices import SLICE_COLUMNS, in_slices, in_spread_slices
from dlrm_sharded.search.state import State
from dlrm_sharded.search.stopping import StoppingRule

TARGETS = (1.0, 1.1, 1.3, 2.0)
"""Largest processing times of a piece, relative to the mean of the ranks in a plan that costs the
lower bound. Study: targets."""

FEW_PER_RANK = 4
"""Units per rank up to which single units decide what a rank costs. Study: few units."""

FEW, SMALL_TASK = 64, 200
"""Up to `FEW` units are few on any number of ranks; up to `SMALL_TASK`, twice as many per rank are
few, because there is time for all starts. Study: few units."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of plans with which each part of a search continues, and its patience.

    Args:
        descents: number of the cheapest first plans that descend.
        sliced: number of the best of them whose pieces are put in slices.
        walks: number of the best plans from which walks start.
        patience: factor of the patience of a walk.
    """

    descents: int
    sliced: int
    walks: int
    patience: int


THOROUGH, BRIEF = Effort(32, 4, 4, 2), Effort(2, 1, 1, 1)
"""Efforts for few units, whose plans differ most, and for many units, which take long. Study: few
units."""

HOPELESS = 1.5
"""Plans in slices that cost more than this times the best plan are not improved."""

START_STUCK = 8
"""Number of ranks without a move at which the descent of a start ends. What blocks these ranks
usually blocks the others, too, and the best states are improved in full later."""

Cuts = tuple[UnitCut, ...]


def effort_for(problem: Problem, stopping: StoppingRule) -> Effort:
    """Return the effort for a problem; a search without patience is brief."""
    is_few = are_few(problem.num_units, problem.world_size)
    return THOROUGH if is_few and stopping.patience else BRIEF


def are_few(num_units: int, world_size: int) -> bool:
    """Return whether single units decide what the ranks cost, see `FEW_PER_RANK` and `FEW`."""
    few = FEW_PER_RANK * world_size
    return num_units <= few or num_units <= max(FEW, min(2 * few, SMALL_TASK))


def objective_ms_of(state: State) -> float:
    return state.objective_ms


def descended_starts(
    problem: Problem, bound_ms: float, rng: np.random.Generator, stopping: StoppingRule
) -> list[State]:
    """Return the cheapest first plans and one with replicas, after a descent, the best first."""
    plans: dict[float, State] = {}  # by objective: many cuts lead to the same plan
    for state in _first_plans(problem, bound_ms):
        plans.setdefault(state.objective_ms, state)
        if stopping.ends_at(math.inf):
            break
    cheapest = sorted(plans.values(), key=objective_ms_of)
    found: list[State] = []
    for start in cheapest[: effort_for(problem, stopping).descents]:
        found.append(_descended(start, rng, stopping))
        if stopping.ends_at(min(map(objective_ms_of, found))):
            break
    found.sort(key=objective_ms_of)
    if found and not stopping.ends_at(found[0].objective_ms):
        replicated = found[0].copy_for(problem)
        if replicate(replicated):
            found.append(_descended(replicated, rng, stopping))
    return sorted(found, key=objective_ms_of)


def descended_slices(
    states: list[State], rng: np.random.Generator, stopping: StoppingRule
) -> list[State]:
    """Return the best plan for each width and way of slicing, after a descent.

    Args:
        states: the plans whose pieces are put in slices, the best first.
    """
    best_ms, problem, found = states[0].objective_ms, states[0].problem, list[State]()
    effort = effort_for(problem, stopping)
    states = states[: effort.sliced]
    for columns in SLICE_COLUMNS if problem.has_crowding else ():
        ways = [[in_slices(state, columns) for state in states]]
        if effort is THOROUGH:
            ways += [
                [in_spread_slices(state, columns, blocks=blocks) for state in states]
                for blocks in ("kept", "narrow", "none")
            ]
        for sliced in ways:
            made = [state for state in sliced if state is not None]
            start = min(made, key=objective_ms_of, default=None)
            if start is None or start.objective_ms > HOPELESS * best_ms:
                continue
            if stopping.ends_at(best_ms):
                return found
            found.append(_descended(start, rng, stopping))
            best_ms = min(best_ms, found[-1].objective_ms)
    return found


def _descended(state: State, rng: np.random.Generator, stopping: StoppingRule) -> State:
    Descent(state, rng, stopping.clock).run(max_stuck=START_STUCK)
    return state


def _first_plans(problem: Problem, bound_ms: float) -> Iterator[State]:
    """Yield first plans, and, if there is crowding, others with similar widths on each rank."""
    tried: set[Cuts] = set()
    for cuts in _start_cuts(problem, bound_ms):
        if cuts in tried:  # different targets often lead to the same cuts
            continue
        tried.add(cuts)
        if (state := first_plan(problem, cuts)) is not None:
            yield state
        if problem.has_crowding and (state := placed_plan(problem, cuts, by_width=True)):
            yield state


def _start_cuts(problem: Problem, bound_ms: float) -> Iterator[Cuts]:
    """Yield cuts of all units, for the lowest target first.

    An exchange costs all ranks a fixed time, which is saved when its last unit is gone. Moves of
    one unit do not see that, so the last cuts leave whole kinds of exchanges out.
    """
    mean_ms = problem.mean_processing_ms(bound_ms)
    targets = [cut_units(problem, mean_ms * target) for target in TARGETS]
    columns = cut_units(problem, mean_ms, kinds=(None,))
    narrow = cut_units(problem, 0.0, kinds=(None,))
    for cuts in (*targets, columns, narrow):
        yield from (cuts, with_replicas(problem, cuts))
    kinds = range(len(problem.blocks))
    for number in (1, 2):
        for chosen in itertools.combinations(kinds, number):
            yield cut_units(problem, math.inf, kinds=chosen)
