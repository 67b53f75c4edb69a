"""Searches without an earlier plan, in wide steps of columns, and in narrow ones if need be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, MAX_COLUMNS
from dlrm_sharded.search.build_problem import MAX_WIDTHS
from dlrm_sharded.search.feasibility import are_steps_large, why_infeasible
from dlrm_sharded.search.find_plan import find_state
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import State
from dlrm_sharded.search.stopping import Clock, StoppingRule

GOOD_GAP = 0.003
"""A plan that costs so much more than the lower bound, relative to it, is good enough."""

ALL_WIDTHS = MAX_COLUMNS // COLUMN_MULTIPLE
WIDE = MAX_WIDTHS * COLUMN_MULTIPLE
"""Columns above which shards cannot have all widths, unless nothing else fits."""

Build = Callable[..., Problem]


@dataclass(frozen=True, slots=True)
class Found:
    """A state, and its problem.

    Args:
        state: the best state found; None if none was found that fits.
    """

    state: State | None
    problem: Problem


@dataclass(frozen=True, slots=True)
class SearchFromScratch:
    """Finds states of problems.

    Args:
        seed, patience: see `SearchSharder`.
    """

    seed: int
    patience: int

    def stopping(self, clock: Clock) -> StoppingRule:
        """Return when to stop a search under a clock."""
        return StoppingRule(self.patience, GOOD_GAP, clock)

    def find(self, problem: Problem, clock: Clock) -> State | None:
        """Return the best state found; None if none fits, or none was found."""
        if why_infeasible(problem):
            return None
        has_replicas = problem.replicas is not None
        return find_state(
            problem,
            _bound_ms(problem),
            self.seed,
            self.stopping(clock),
            split_bound_ms=(
                lower_bound_ms(problem.priced, replicas=False) if has_replicas else None
            ),
        )

    def find_in_steps(self, build: Build, clock: Clock) -> Found:
        """Return the best state found in wide steps of columns, or in narrow ones.

        Narrow steps may find room, or fill it better, and take longer.

        Args:
            build: returns the problem in wide steps, unless it is given `max_widths`.
        """
        problem = build()
        is_wide = any(table.embedding_dim > WIDE for table in problem.task.tables)
        best = Found(self.find(problem, clock), problem)
        if is_wide and (best.state is None or (are_steps_large(problem) and not clock.is_over)):
            narrow = build(max_widths=ALL_WIDTHS)
            other = Found(self.find(narrow, clock), narrow)
            if best.state is None or (
                other.state and other.state.objective_ms < best.state.objective_ms
            ):
                return other
        return best


def _bound_ms(problem: Problem) -> float:
    """Return the lower bound of the plans that the search makes."""
    # Plans that the search does not make are no reason for it to go on.
    replicas, priced = problem.replicas is not None, problem.priced
    return lower_bound_ms(priced, replicas=replicas)
