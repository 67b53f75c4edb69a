"""The outer search: several first plans, the best of them improved, and what it may move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.plan import Shard
from dlrm_sharded.search.construct import Cut, construct, cut_all
from dlrm_sharded.search.improve import Clock, Improver
from dlrm_sharded.search.layout import Earlier, moved_bytes, shards_of_unit
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.rebuild import Rebuilder
from dlrm_sharded.search.state import State

TARGETS = (1.0, 1.1, 1.3, 2.0)
"""What a piece's work may take, relative to the ranks' mean work in a plan that costs the bound."""

MANY_UNITS = 4
"""A rank's, from which on plans of row blocks alone are not worth a start."""

IMPROVEMENT = 1e-6
MAX_STUCK = 1
"""Ranks without a better change, at which the descent after a rebuild ends."""


@dataclass(frozen=True, slots=True)
class Effort:
    """When a search stops.

    Args:
        patience: each of its parts after so many rebuilds in a row without a better plan.
        good_gap: or at this distance from the lower bound, relative to it.
        clock: or then.
    """

    patience: int
    good_gap: float
    clock: Clock


def search(problem: Problem, bound_ms: float, seed: int, effort: Effort) -> State | None:
    """The best state found, None where none was found that fits the ranks' memory."""
    rng = np.random.default_rng(seed)
    good_ms = bound_ms * (1 + effort.good_gap)
    best = _first(problem, bound_ms, good_ms, rng, effort)
    if best is None:
        return None
    best = _improved(best, good_ms, rng, effort, splits=True)
    plain = problem.without_margin()
    # Without the margin a search gets further; with it, splits go that do not pay.
    if best.objective_ms > good_ms and not effort.clock.is_over:
        free = _first(plain, bound_ms, good_ms, rng, effort)
        if free is not None:
            free = _improved(free, good_ms, rng, effort, splits=True).copy_for(problem)
            free = _improved(free, good_ms, rng, effort, splits=True)
            best = min(best, free, key=lambda state: state.objective_ms)
    # Which splits are made is decided; ranks are balanced at predicted costs.
    return _improved(best.copy_for(plain), good_ms, rng, effort, splits=False)


def _first(
    problem: Problem, bound_ms: float, good_ms: float, rng: np.random.Generator, effort: Effort
) -> State | None:
    """The best of the first plans, each descended from."""
    best: State | None = None
    tried: set[tuple[Cut, ...]] = set()
    for cuts in _starts(problem, bound_ms):
        if best is not None and (best.objective_ms <= good_ms or effort.clock.is_over):
            break
        if cuts in tried:
            continue
        tried.add(cuts)
        state = construct(problem, cuts)
        if state is None:
            continue
        Improver(state, rng, effort.clock).descend()
        if best is None or state.objective_ms < best.objective_ms:
            best = state
    return best


def _improved(
    state: State, good_ms: float, rng: np.random.Generator, effort: Effort, *, splits: bool
) -> State:
    """The state, changed for the better by descents and rebuilds."""
    Improver(state, rng, effort.clock, splits=splits).descend()
    _rebuild(state, good_ms, rng, effort, splits=splits)
    return state


def _starts(problem: Problem, bound_ms: float) -> Iterator[tuple[Cut, ...]]:
    """By ever higher targets; then with row blocks nowhere, and wherever they can be."""
    for target in TARGETS:
        yield tuple(cut_all(problem, problem.work_at(bound_ms) * target))
    yield tuple(cut_all(problem, problem.work_at(bound_ms), rows=False))
    if problem.num_units <= MANY_UNITS * problem.world_size:
        yield tuple(cut_all(problem, 0.0, columns=False))


def _rebuild(
    state: State, good_ms: float, rng: np.random.Generator, effort: Effort, *, splits: bool
) -> None:
    """Rebuild parts of a plan and descend; go back unless that led to a better one."""
    improver = Improver(state, rng, effort.clock, splits=splits)
    rebuilder = Rebuilder(state, rng, splits=splits)
    state.log.clear()
    best_ms, failures = state.objective_ms, 0
    while failures < effort.patience and best_ms > good_ms and not effort.clock.is_over:
        if rebuilder.rebuild():
            improver.descend(max_stuck=MAX_STUCK)
            if state.objective_ms < best_ms * (1 - IMPROVEMENT):
                best_ms, failures = state.objective_ms, 0
                state.log.clear()
                continue
        state.undo()
        failures += 1


@dataclass(frozen=True, slots=True)
class Moves:
    """How far a plan may differ from an earlier one; None for no limit."""

    earlier: Earlier
    max_tables: int | None
    max_bytes: int | None


def search_near(state: State, moves: Moves, seed: int, clock: Clock) -> None:
    """Improve a state that holds an earlier plan, one move after another, within limits."""
    rng = np.random.default_rng(seed)
    Improver(state, rng, clock, within=_Limits(state, moves)).descend()


class _Limits:
    """Keeps count of what a state has moved."""

    def __init__(self, state: State, moves: Moves) -> None:
        self._state = state
        self._moves = moves
        self._moved: dict[int, tuple[int, int]] = {}

    def changeable(self) -> np.ndarray | None:
        """[U], units that may be changed; None for all."""
        if self._moves.max_tables is None:
            return None
        problem = self._state.problem
        left = self._moves.max_tables - sum(tables for tables, _ in self._moved.values())
        allowed = np.array([len(tables) <= left for tables in problem.tables])
        allowed[list(self._moved)] = True
        return allowed

    def most_bytes(self) -> Floats | None:
        """[U], how much of a unit may move; of those that moved already, `accept` alone knows."""
        if self._moves.max_bytes is None:
            return None
        left = self._moves.max_bytes - sum(num_bytes for _, num_bytes in self._moved.values())
        most = np.full(self._state.problem.num_units, float(left))
        most[list(self._moved)] = np.inf
        return most

    def accept(self, units: set[int]) -> bool:
        """Whether the state is within limits now that these units were changed; notes it if so."""
        moved = dict(self._moved)
        for unit in units:
            moved.pop(unit, None)
            tables, num_bytes = self._of_unit(unit)
            if tables:
                moved[unit] = tables, num_bytes
        limits = (self._moves.max_tables, self._moves.max_bytes)
        for limit, of_units in zip(limits, zip(*moved.values(), strict=True), strict=False):
            if limit is not None and sum(of_units) > limit:
                return False
        self._moved = moved
        return True

    def _of_unit(self, unit: int) -> tuple[int, int]:
        """Tables of it that moved, and bytes."""
        task, earlier = self._state.problem.task, self._moves.earlier
        of_table: dict[str, list[Shard]] = {}
        for shard in shards_of_unit(self._state, unit, earlier):
            of_table.setdefault(shard.table, []).append(shard)
        changed = [
            (name, shards) for name, shards in of_table.items() if shards != list(earlier[name])
        ]
        num_bytes = sum(moved_bytes(task, earlier[name], shards) for name, shards in changed)
        return len(changed), num_bytes
