"""Columns of sequences: which modules are split by columns, and at which width.

All column shards of such a module have one width (`plans.sequences`), so no single move can choose
it. Each width is a problem of its own, in which tables of the module are whole or in pieces of so
many columns, of which a rank may have several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrm_sharded.plans.sequences import equal_widths
from dlrm_sharded.search.find_plan import improve_under
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.starts import MIN_IMPROVEMENT, has_few_units
from dlrm_sharded.search.state import State
from dlrm_sharded.search.stopping import StoppingRule

MOST_WIDTHS = 4
"""Number of widths of a module that are tried if there is a plan without its columns."""

Widths = Mapping[str, int]


def split_sequences(
    problem: Problem,
    start: State | None,
    build: Callable[[Widths], Problem],
    find: Callable[[Problem], State | None],
    *,
    seed: int,
    stopping: StoppingRule,
    good_ms: float,
) -> tuple[State | None, Widths]:
    """Return the best state found with columns of sequences, and their width in each module.

    One module after the other takes the width that is best beside those of the modules before it.

    Args:
        problem: that of the task, in which no sequence is split by columns.
        start: its best state; None if none was found, and then the first one that is found counts.
        build: returns the problem with columns of sequences at these widths, by module.
        find: searches for a state of a problem from scratch.
        good_ms: an objective that is good enough.
    """
    modules = equal_widths(problem.task.tables, problem.task.topology)
    if start is None:
        for i in range(max(map(len, modules.values()), default=0)):
            tried = {module: widths[min(i, len(widths) - 1)] for module, widths in modules.items()}
            if (state := find(build(tried))) is not None:
                return state, tried
        return None, {}
    dims = {table.module: table.embedding_dim for table in problem.task.tables if not table.pooled}
    best, chosen = start, dict[str, int]()
    for module, widths in modules.items():
        before, kept = best, chosen
        # More pieces than ranks only serve to fill the ranks' memory.
        few = [width for width in widths if dims[module] <= width * problem.world_size]
        for width in few[:MOST_WIDTHS]:
            if best.objective_ms <= good_ms or stopping.clock.is_over:
                return best, chosen
            tried = {**kept, module: width}
            other = build(tried)
            state = find(other) if has_few_units(problem) else None
            state = state or improve_under(other, before, seed, stopping)
            if state.objective_ms < best.objective_ms * (1 - MIN_IMPROVEMENT):
                best, chosen = state, tried
    return best, chosen
