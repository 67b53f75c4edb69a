"""Plans told apart by the layouts of a few tables, so that their lower bounds are higher (L15).

A relaxation may lay out a tenth of a table in one way and the rest in another. Where the costliest
tables have one layout each, it cannot, and the lowest bound of all such sets of plans is a bound of
all plans: lemma L15 of docs/notes/lower_bound.md.

Letters: T tables.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from dlrm_sharded.cost.plan_kinds import Cuts, Mask

NUM_TOLD_APART, MOST_TABLES_TOLD_APART = 2, 128
"""Number of tables whose layouts tell plans apart; none do in tasks of more tables than that, whose
single tables matter less."""


def least_bound_ms(
    cuts: Sequence[Cuts], bound_ms: Callable[[Sequence[Cuts], float], float]
) -> float:
    """Return the lowest bound of all plans, told apart as long as that raises it.

    Args:
        cuts: the layouts that tables may have, columns first.
        bound_ms: returns the lowest bound of plans with some layouts, given a time that none of
            these plans undercuts.
    """
    tables = _told_apart(cuts[0])
    # a heap of sets of plans by their bounds, each with the number of its tables told apart
    number = itertools.count()
    plans = [(bound_ms(cuts, 0.0), next(number), 0, cuts)]
    while True:
        lowest_ms, _, told, cuts = plans[0]
        if told == len(tables) or lowest_ms == math.inf:
            return lowest_ms
        heapq.heappop(plans)
        for i in range(len(cuts)):
            fewer = [c if c is cuts[i] else c.without(tables[told]) for c in cuts]
            heapq.heappush(plans, (bound_ms(fewer, lowest_ms), next(number), told + 1, fewer))


def _told_apart(columns: Cuts) -> list[Mask]:
    """Return masks [T] of the tables whose layouts tell plans apart, the costliest first."""
    whole = np.append(columns.first[1:], len(columns.mean_ms)) - 1
    if len(whole) > MOST_TABLES_TOLD_APART:
        return []
    costliest = np.argsort(-columns.mean_ms[whole], kind="stable")[:NUM_TOLD_APART]
    return [np.arange(len(whole)) == table for table in costliest.tolist()]
