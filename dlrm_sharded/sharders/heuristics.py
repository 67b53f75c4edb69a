"""Greedy table-wise placement: the five heuristics that the papers compare with.

Tables are placed in descending order of a weight. Each goes to the rank with the lowest load among
those with enough free memory (NeuroShard, arXiv:2305.01868, sec. 4); a rank's load is the sum of
its tables' weights, and ties go to the rank with the least memory in use. `random` takes any rank
with enough free memory. Differs from the paper: if that order runs out of memory, the placement is
repaired by placing large tables first, instead of overflowing a rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.files.errors import InfeasibleTaskError, check_choice, check_count
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import MEMORY_KEYS, ShardingTask
from dlrm_sharded.plans.validation import SPLITTING_ADVICE, why_too_large, why_too_wide

WEIGHTS: dict[str, Callable[[Table], float]] = {
    "size": lambda t: t.num_embeddings * t.embedding_dim,
    "dim": lambda t: t.embedding_dim,
    "lookup": lambda t: t.embedding_dim * t.pooling_factor,
    "size_lookup": lambda t: (
        t.embedding_dim * t.pooling_factor * math.log10(max(t.num_embeddings, 10))
    ),
}
"""Weights of the greedy sharder by name. The policies also try each of them, so a new one may
change their plans."""

Ranking = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]
"""Scores ranks from their load and free bytes; the lowest score gets the next table."""


@dataclass(frozen=True, slots=True, eq=False)
class GreedySharder:
    """Balances the load by one of `WEIGHTS`. The seed orders tables of equal weight."""

    weight: str
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_choice("sharder.weight", self.weight, WEIGHTS)
        check_count("sharder.seed", self.seed, least=0)

    @property
    def name(self) -> str:
        return self.weight

    def shard(self, task: ShardingTask) -> ShardingPlan:
        weigh = WEIGHTS[self.weight]
        tables = list(task.tables)
        random.Random(self.seed).shuffle(tables)
        tables.sort(key=weigh, reverse=True)
        return _place(task, tables, [weigh(t) for t in tables], least_loaded)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomSharder:
    """Places every table on a random rank among those with memory for it."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        check_count("sharder.seed", self.seed, least=0)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        rng = np.random.default_rng(self.seed)
        tables = [task.tables[i] for i in rng.permutation(len(task.tables))]

        def any_rank(load: NDArray[np.float64], _: NDArray[np.int64]) -> NDArray[np.float64]:
            return rng.random(len(load))

        return _place(task, tables, [1.0] * len(tables), any_rank)


def place_greedily(
    task: ShardingTask, tables: Sequence[Table], weights: Sequence[float], ranking: Ranking
) -> list[int]:
    """Place tables one after another, in the given order, each within the free memory of a rank.

    Args:
        weights: load that each table adds to its rank.
        ranking: ties go to the rank with the least memory in use, then to the lowest rank.

    Returns:
        The rank of each table.

    Raises:
        InfeasibleTaskError: no rank has enough free memory for a table.
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
        lowest = np.flatnonzero(score == score.min())
        rank = int(lowest[used[lowest].argmin()])
        load[rank] += weight
        used[rank] += size
        ranks.append(rank)
    return ranks


def least_loaded(load: NDArray[np.float64], _: NDArray[np.int64]) -> NDArray[np.float64]:
    return load


def most_free(_: NDArray[np.float64], free: NDArray[np.int64]) -> NDArray[np.float64]:
    return -free.astype(np.float64)


def tightest(_: NDArray[np.float64], free: NDArray[np.int64]) -> NDArray[np.float64]:
    return free.astype(np.float64)


def first_fit(_: NDArray[np.float64], free: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.arange(len(free), dtype=np.float64)


def _place(
    task: ShardingTask, tables: list[Table], weights: list[float], ranking: Ranking
) -> ShardingPlan:
    """Place tables in the given order if memory allows, else with ever more large tables first.

    The 1, 2, 4, ... largest tables come first and the rest keep their order. If that fails too, all
    tables are packed by size: by the ranking, into the rank with the most free memory, into the
    tightest rank, and into the first rank that fits.
    """
    if reason := why_too_wide(task, splits=False):
        raise InfeasibleTaskError(reason)
    by_size = sorted(
        range(len(tables)), key=lambda i: task.topology.table_bytes(tables[i]), reverse=True
    )
    attempts: list[tuple[list[int], Ranking]] = [(list(range(len(tables))), ranking)]
    num_first = 1
    while num_first < len(tables):
        largest = by_size[:num_first]
        rest = sorted(set(range(len(tables))) - set(largest))
        attempts.append((largest + rest, ranking))
        num_first *= 2
    attempts += [(by_size, packer) for packer in (ranking, most_free, tightest, first_fit)]
    failure: InfeasibleTaskError | None = None
    for order, attempt_ranking in attempts:
        ordered = [tables[i] for i in order]
        try:
            ranks = place_greedily(task, ordered, [weights[i] for i in order], attempt_ranking)
        except InfeasibleTaskError as error:
            failure = error
        else:
            placed = zip(ordered, ranks, strict=True)
            shards = tuple(Shard.whole(table, rank) for table, rank in placed)
            return ShardingPlan(task.topology.world_size, shards)
    assert failure is not None
    reason = why_too_large(task, task.topology.rank_memory_bytes)
    raise InfeasibleTaskError(reason) if reason else failure


def _no_rank_fits(
    table: Table, size: int, used: NDArray[np.int64], capacity: NDArray[np.int64]
) -> InfeasibleTaskError:
    freest = int((capacity - used).argmax())
    if size > capacity.max():
        largest = "any rank" if capacity.min() == capacity.max() else "the largest rank"
        return InfeasibleTaskError(
            f"table {table.name!r} needs {size:,} B, more than the {capacity.max():,} B of "
            f"{largest} (rank {freest} is freest); add memory ({MEMORY_KEYS}), cap the table's "
            f"rows, or {SPLITTING_ADVICE}"
        )
    return InfeasibleTaskError(
        f"table {table.name!r} needs {size:,} B, the freest rank ({freest}) has "
        f"{capacity[freest] - used[freest]:,} B left of {capacity[freest]:,} B; "
        f"add ranks or memory ({MEMORY_KEYS}), or {SPLITTING_ADVICE}"
    )
