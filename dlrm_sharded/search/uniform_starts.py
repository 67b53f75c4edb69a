"""States with all units in the same kinds of blocks: replicas, row blocks, or the cheaper of some.

An exchange costs all ranks a fixed time, which is saved when its last unit is gone. Moves of one
unit do not see that, so the search also starts where an exchange is gone altogether.

Letters: U units, K kinds of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.search.cuts import UnitCut
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import COLUMNS, State


def uniform_states(state: State, *, all_kinds: bool) -> Iterator[State]:
    """Yield states like this one with all units, as far as they may, in blocks of chosen kinds.

    Each unit takes the kind that is cheapest for all ranks together.

    Args:
        state: where the other units are.
        all_kinds: whether to yield what leaves an exchange of vectors, too. Otherwise, states are
            only made if they seem to cost less.
    """
    problem = state.problem
    if not problem.blocks:
        return
    ms = np.stack([kind_ms(problem, kind) for kind in range(len(problem.blocks))])  # [K, U]
    numbers = range(len(problem.blocks))
    for size in range(1, len(numbers) + 1):
        for kinds in itertools.combinations(numbers, size):
            # a kind that is cheapest for no unit makes no other state
            best = np.array(kinds)[ms[list(kinds)].argmin(axis=0)]
            if len(np.unique(best[np.isfinite(ms[best, np.arange(len(best))])])) < size:
                continue
            if not all_kinds and not _seems_cheaper(state, kinds, ms):
                continue
            yield _with_blocks(state, best, ms)


def with_narrow_blocks(problem: Problem, cuts: Sequence[UnitCut]) -> Iterator[tuple[UnitCut, ...]]:
    """Yield cuts with units up to some number of columns in row blocks, or each in its best kind.

    Blocks are as wide as their table, and on a GPU the widest shard slows down all lookups.
    """
    if not problem.blocks:
        return
    ms = np.stack([kind_ms(problem, kind) for kind in range(len(problem.blocks))])
    are_global = [kind for kind, blocks in enumerate(problem.blocks) if blocks.is_global]
    rows = [kind for kind in are_global if not problem.blocks[kind].is_replica]
    columns = np.array(
        [max(problem.task.tables[i].embedding_dim for i in tables) for tables in problem.tables]
    )
    for kinds in dict.fromkeys((tuple(rows), tuple(are_global))):
        if not kinds:
            continue
        best = np.array(kinds)[ms[list(kinds)].argmin(axis=0)]
        possible = np.isfinite(ms[best, np.arange(len(best))])
        for most in sorted({*columns[possible].tolist()}, reverse=True):
            in_blocks = possible & (columns <= most)
            yield tuple(
                UnitCut(kind=kind) if is_in_blocks else cut
                for kind, is_in_blocks, cut in zip(
                    best.tolist(), in_blocks.tolist(), cuts, strict=True
                )
            )


def kind_ms(problem: Problem, kind: int) -> Floats:
    """Return [U], what a unit in a kind of blocks takes of a rank on average; inf if it cannot."""
    blocks = problem.blocks[kind]
    ms = blocks.load.sum(axis=1) * blocks.group_size / problem.world_size + blocks.shared_ms
    return np.where(blocks.possible, ms, np.inf)


def _seems_cheaper(state: State, kinds: tuple[int, ...], ms: Floats) -> bool:
    """Return whether no exchange of vectors is left, and what remains costs less than a state."""
    blocks = [state.problem.blocks[kind] for kind in kinds]
    if not all(kind.is_global for kind in blocks):
        return False
    total_ms = float(ms[list(kinds)].min(axis=0).sum()) + sum(kind.fixed_ms for kind in blocks)
    return total_ms < state.objective_ms


def _with_blocks(state: State, kinds: Floats, ms: Floats) -> State:
    """Return a state with units in kinds [U] of blocks, the costliest first, as far as they fit."""
    problem, other = state.problem, state.copy_for(state.problem)
    group_load = np.zeros(len(problem.groups))
    cost_ms = ms[kinds, np.arange(len(kinds))]
    for unit in np.argsort(-cost_ms, kind="stable").tolist():
        if not np.isfinite(cost_ms[unit]) or problem.must_replicate[unit]:
            continue
        blocks = problem.blocks[kinds[unit]]
        before = len(other.log)
        for rank in list(other.widths[unit]):
            other.set_width(unit, rank, 0)
        other.set_group(unit, COLUMNS)
        allowed = other.allowed_ranks(unit)
        for group in sorted(blocks.groups, key=group_load.__getitem__):
            members = problem.groups[group].members
            fits = other.free_bytes[members] >= blocks.size_bytes[unit]
            if fits.all() and allowed[members].all():
                other.set_group(unit, group)
                group_load[group] += blocks.load[unit].sum()
                break
        else:
            other.undo(before)
    other.refresh()
    other.log.clear()
    return other
