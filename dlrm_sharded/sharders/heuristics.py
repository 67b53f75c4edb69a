"""Greedy table-wise placement: the five heuristics that the papers compare with.

Tables in descending order of a weight; each goes to the rank with the least weight so far among
those with memory left (NeuroShard, arXiv:2305.01868, sec. 4; ties: least memory). `random` takes
any rank with memory left. Differs: where that order runs out of memory, the placement is repaired
by placing large tables first, instead of overflowing a rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError, check_count
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask

WEIGHTS: dict[str, Callable[[Table], float]] = {
    "size": lambda t: t.num_embeddings * t.embedding_dim,
    "dim": lambda t: t.embedding_dim,
    "lookup": lambda t: t.embedding_dim * t.pooling_factor,
    "size_lookup": lambda t: (
        t.embedding_dim * t.pooling_factor * math.log10(max(t.num_embeddings, 10))
    ),
}

Ranking = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]
"""Of each rank's weight so far and bytes left, a figure whose least rank takes the next table."""


class GreedySharder:
    """Balances the sum of one of `WEIGHTS`. The seed decides between tables of equal weight."""

    def __init__(self, weight: str, *, seed: int = 0) -> None:
        if weight not in WEIGHTS:
            raise ConfigError(f"sharder.weight is {weight!r}; known: {', '.join(WEIGHTS)}")
        check_count("sharder.seed", seed, least=0)
        self.name = weight
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        weigh = WEIGHTS[self.name]
        tables = list(task.tables)
        random.Random(self._seed).shuffle(tables)
        tables.sort(key=weigh, reverse=True)
        return _place(task, tables, [weigh(t) for t in tables], least_weight)


class RandomSharder:
    """Places every table on a random rank among those with memory for it."""

    name = "random"

    def __init__(self, *, seed: int = 0) -> None:
        check_count("sharder.seed", seed, least=0)
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        rng = np.random.default_rng(self._seed)
        tables = [task.tables[i] for i in rng.permutation(len(task.tables))]

        def any_rank(weights: NDArray[np.float64], _: NDArray[np.int64]) -> NDArray[np.float64]:
            return rng.random(len(weights))

        return _place(task, tables, [1.0] * len(tables), any_rank)


def place_greedily(
    task: ShardingTask, tables: Sequence[Table], weights: Sequence[float], ranking: Ranking
) -> list[int]:
    """Place tables one after another, in the given order, each within the memory left.

    Args:
        weights: one a table; they add up on the ranks.
        ranking: which rank comes first; ties go to the least memory used, then the least rank.

    Returns:
        The rank of each table.

    Raises:
        InfeasibleTaskError: a table fits no rank, or none any more; names it and the freest rank.
    """
    topology = task.topology
    capacity = np.array(topology.rank_memory_bytes, dtype=np.int64)
    load = np.zeros(topology.world_size)
    used = np.zeros(topology.world_size, dtype=np.int64)
    ranks = []
    for table, weight in zip(tables, weights, strict=True):
        size = topology.table_bytes(table)
        fits = used + size <= capacity
        if not fits.any():
            raise _no_rank_fits(table, size, used, capacity)
        score = np.where(fits, ranking(load, capacity - used), np.inf)
        least = np.flatnonzero(score == score.min())
        rank = int(least[used[least].argmin()])
        load[rank] += weight
        used[rank] += size
        ranks.append(rank)
    return ranks


def least_weight(weights: NDArray[np.float64], _: NDArray[np.int64]) -> NDArray[np.float64]:
    return weights


def most_free(_: NDArray[np.float64], free: NDArray[np.int64]) -> NDArray[np.float64]:
    return -free.astype(np.float64)


def tightest(_: NDArray[np.float64], free: NDArray[np.int64]) -> NDArray[np.float64]:
    return free.astype(np.float64)


def first_fit(_: NDArray[np.float64], free: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.arange(len(free), dtype=np.float64)


def _place(
    task: ShardingTask,
    tables: list[Table],
    weights: list[float],
    ranking: Ranking,
) -> ShardingPlan:
    tables, ranks = _place_with_repair(task, tables, weights, ranking)
    return ShardingPlan(
        task.topology.world_size,
        tuple(Shard.whole(table, rank) for table, rank in zip(tables, ranks, strict=True)),
    )


def _place_with_repair(
    task: ShardingTask, tables: list[Table], weights: list[float], ranking: Ranking
) -> tuple[list[Table], list[int]]:
    """The given order and ranking if memory allows; else ever more of the largest tables first.

    The largest `first` tables go to the rank with most room and the rest keep their order; then
    the classic packers (size-first by the ranking, most free, tightest, first) have the last word.
    """
    by_size = sorted(
        range(len(tables)), key=lambda i: task.topology.table_bytes(tables[i]), reverse=True
    )
    attempts: list[tuple[list[int], Ranking]] = [(list(range(len(tables))), ranking)]
    first = 1
    while first < len(tables):
        head = by_size[:first]
        rest = sorted(set(range(len(tables))) - set(head))
        attempts.append((head + rest, ranking))
        first *= 2
    attempts += [(by_size, packer) for packer in (ranking, most_free, tightest, first_fit)]
    failure: InfeasibleTaskError | None = None
    for order, attempt_ranking in attempts:
        ordered = [tables[i] for i in order]
        try:
            ranks = place_greedily(task, ordered, [weights[i] for i in order], attempt_ranking)
        except InfeasibleTaskError as error:
            failure = error
        else:
            return ordered, ranks
    assert failure is not None
    raise failure


def _no_rank_fits(
    table: Table, size: int, used: NDArray[np.int64], capacity: NDArray[np.int64]
) -> InfeasibleTaskError:
    freest = int((capacity - used).argmax())
    if size > capacity.max():
        of_ranks = "any rank" if capacity.min() == capacity.max() else "the largest rank"
        return InfeasibleTaskError(
            f"table {table.name!r} needs {size:,} B, more than the {capacity.max():,} B of "
            f"{of_ranks} (rank {freest} is freest); raise topology.memory_gib, cap the table's "
            "rows, or use a plan that splits the table (sharder=plan_file)"
        )
    return InfeasibleTaskError(
        f"table {table.name!r} needs {size:,} B, the freest rank ({freest}) has "
        f"{capacity[freest] - used[freest]:,} B left of {capacity[freest]:,} B; "
        "add ranks, raise topology.memory_gib, or use a plan that splits columns"
    )
