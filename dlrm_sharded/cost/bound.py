"""A lower bound of `PlanCost.cost_ms` over all plans of a task, under an additive cost model.

The slowest rank costs no less than the ranks do on average (L1), and the mean is nearly a sum over
the pieces into which the tables are cut, wherever these go: the work of a piece costs least on a
rank that reads nothing else (L2), and exchanges cost least on average where the ranks' volumes
are even (L3). So every table can take its cheapest pieces by itself (L4). A piece that alone makes
a rank cost more than T is in no plan of cost T, so a T that is lower than the mean of the cheapest
of the other pieces is lower than the cost of every plan (L5).

docs/notes/lower_bound.md has the lemmas L1 to L10, their proofs and an example with numbers.

Letters: T tables, n sizes of pieces, W ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.exchange_prices import ExchangePrices, LeastExchangePrices, ReducePrices
from dlrm_sharded.cost.shapes import BlockShapes, Indices, Pieces, Shapes
from dlrm_sharded.cost.workload import Floats

NUM_BISECTIONS = 20
"""Steps of the bisection, which leave an interval of 2 ** -20 of the bound."""

LEAST_MS = 1e-6
"""Lowest cost, in ms, at which the search for an upper end of the interval starts."""

LEAST_ROOM_MS = 1e-9
"""Keeps the time that a rank has for its work above zero."""


def lower_bound_ms(priced: PricedTask, *, replicas: bool = True) -> float:
    """Return a cost that no valid plan undercuts, or inf if it is certain that no plan fits.

    Args:
        replicas: whether plans may replicate tables; the bound of those that do not is no lower.
    """
    return _relaxed(priced).bound_ms(replicas=replicas)


@functools.lru_cache(maxsize=8)
def _relaxed(priced: PricedTask) -> Relaxation:
    """Return the relaxed task; cached, as the search and the report of one run both need it."""
    return Relaxation(priced)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ways to lay out tables in pieces of one kind: columns, row blocks over groups of one size, or
    replicas.

    Args:
        first: [T], where each table's sizes of pieces begin.
        possible: [n], whether the pieces exist.
        size_bytes: [n], memory of a piece.
        piece_ms: [n], least cost of a rank that holds a piece, without the costs of every rank.
        work_ms: [n], computation of the whole table in such pieces, on all ranks together.
        mean_ms: [n], cost of the whole table in such pieces, averaged over ranks.
        every_rank_ms: [T], least time that every rank pays for the table: for its exchanges, and
            for a replica in all.
    """

    first: Indices
    possible: NDArray[np.bool_]
    size_bytes: Indices
    piece_ms: Floats
    work_ms: Floats
    mean_ms: Floats
    every_rank_ms: Floats

    def least(self, values: Floats, allowed: NDArray[np.bool_]) -> Floats:
        """Return [T], the least of values [n] over each table's allowed sizes; inf without any."""
        return np.minimum.reduceat(np.where(allowed, values, np.inf), self.first)


@dataclass(frozen=True, slots=True)
class PlanKind:
    """Plans that cut tables in the same ways, and therefore have the same fixed costs (L8).

    Args:
        fixed_ms: time of exchanges that does not depend on volumes, averaged over ranks.
        every_rank_fixed_ms: the part of it that every rank pays.
        all_launch: whether every rank launches a lookup, as all of them hold the replicas.
    """

    cuts: tuple[Cuts, ...]
    fixed_ms: float
    every_rank_fixed_ms: float
    all_launch: bool = False


class Relaxation:
    """A relaxed task, in which fractions of pieces may go anywhere, so that no plan is cheaper."""

    def __init__(self, priced: PricedTask) -> None:
        task, compute, hosts = priced.task, priced.compute, priced.hosts
        self._world_size = task.topology.world_size
        memory = task.topology.rank_memory_bytes
        self._capacity, self._too_large = max(memory), task.table_bytes > sum(memory)
        self._compute = compute
        first_ms, both_ms = compute.launch_ms(np.array([1.0, 2.0])).sum(axis=1).tolist()
        self._launch_ms, self._next_launch_ms = first_ms, both_ms - first_ms
        self._prices = ExchangePrices.from_model(priced.communication, hosts)
        self._least_prices = LeastExchangePrices.from_model(priced.communication, hosts)
        shapes = Shapes.from_task(task, compute)
        self._columns = self._cut_columns(shapes)
        self._row_blocks = shapes.row_blocks
        self._blocks = tuple(self._cut_rows(blocks) for blocks in shapes.row_blocks)
        self._replicas = None
        if shapes.replicas is not None:
            self._replicas = self._replicate(shapes.replicas, least_memory=min(memory))

    def bound_ms(self, *, replicas: bool = True) -> float:
        """Return the lowest bound of all kinds of plans, or of those without replicas."""
        if self._too_large:
            return math.inf
        kinds = self.kinds() if replicas else self._kinds_without_replicas()
        return min(self.bound_of_kind_ms(kind) for kind in kinds)

    def kinds(self) -> list[PlanKind]:
        """Return the kinds of plans: each without replicas, with some, and replicas alone."""
        without, replicas = self._kinds_without_replicas(), self._replicas
        if replicas is None or not replicas.possible.any():
            return without
        fixed_ms = self._prices.gradients.fixed_ms
        with_some = [
            PlanKind(
                (*kind.cuts, replicas),
                kind.fixed_ms + fixed_ms,
                kind.every_rank_fixed_ms + fixed_ms,
                all_launch=True,
            )
            for kind in without
        ]
        return [*without, *with_some, PlanKind((replicas,), fixed_ms, fixed_ms, all_launch=True)]

    def _kinds_without_replicas(self) -> list[PlanKind]:
        """Return the kinds: only columns, only row blocks over all ranks, all others."""
        fixed_ms = self._prices.fixed_ms
        kinds = [PlanKind((self._columns,), fixed_ms, fixed_ms)]
        if self._blocks:
            reduce_ms = self._reduces(self._row_blocks[0]).fixed_ms
            least_ms = min(
                self._reduces(blocks).fixed_ms / blocks.num_groups for blocks in self._row_blocks
            )
            # with groups of hosts, the ranks of one host may be all that reduce
            every_rank_ms = reduce_ms if len(self._blocks) == 1 else 0.0
            kinds += [
                PlanKind(self._blocks[:1], reduce_ms, reduce_ms),
                PlanKind(
                    (self._columns, *self._blocks), fixed_ms + least_ms, fixed_ms + every_rank_ms
                ),
            ]
        return kinds

    def bound_of_kind_ms(self, kind: PlanKind) -> float:
        """Return the largest cost found that no plan of a kind undercuts (L5)."""
        low = self.mean_ms(math.inf, kind)
        if low == math.inf:
            return low
        # `low` is M(inf) or has passed the test, so the end that the bisection returns is a bound
        high = max(low, LEAST_MS)
        while self.mean_ms(high, kind) > high:
            low, high = high, 2.0 * high
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            if self.mean_ms(middle, kind) > middle:
                low = middle
            else:
                high = middle
        return low

    def mean_ms(self, limit_ms: float, kind: PlanKind) -> float:
        """Return a lower bound of the ranks' mean cost in plans that cost `limit_ms` or less.

        It is inf if there is no such plan.
        """
        every_rank_ms = kind.every_rank_fixed_ms + _paid_by_every_rank_ms(kind)
        num_tables = len(self._columns.first)
        least_mean = least_work = np.full(num_tables, np.inf)
        must_shard = np.ones(num_tables, dtype=bool)
        for cuts in kind.cuts:
            fits = cuts.possible & (cuts.size_bytes <= self._capacity)
            allowed = fits & (cuts.piece_ms + every_rank_ms <= limit_ms)
            if cuts is self._replicas:  # a rank pays for all of a replica (L10)
                paid_ms = self._launch_ms + kind.every_rank_fixed_ms + cuts.every_rank_ms
                allowed &= paid_ms <= limit_ms
                must_shard = ~allowed
            least_mean = np.minimum(least_mean, cuts.least(cuts.mean_ms, allowed))
            least_work = np.minimum(least_work, cuts.least(cuts.work_ms, allowed))
        mean_ms = float(least_mean.sum()) + kind.fixed_ms
        if mean_ms == math.inf or limit_ms == math.inf:
            return mean_ms
        # ranks that hold anything launch a lookup, and few of them cannot do all the work (L6)
        room_ms = limit_ms - self._launch_ms - every_rank_ms
        if not kind.all_launch:
            return mean_ms + self._launch_ms * self._share_used(least_work, room_ms)
        # All ranks launch the replicas' lookup, and those with other tables a second one.
        second_ms = self._next_launch_ms
        share_used = self._share_used(least_work * must_shard, room_ms - second_ms)
        return mean_ms + self._launch_ms + second_ms * share_used

    def _share_used(self, least_work: Floats, room_ms: float) -> float:
        """Return the least share of the ranks that do work [T] if each has so much time for it."""
        num_used = math.ceil(float(least_work.sum()) / max(room_ms, LEAST_ROOM_MS))
        return min(num_used, self._world_size) / self._world_size

    def _cut_columns(self, shapes: Shapes) -> Cuts:
        """Price column shards of every width, and whole tables in shards of equal widths."""
        columns = shapes.columns
        work_ms = self._compute.stand_alone_ms(columns.vectors)
        exchange_ms = columns.volume * (self._prices.even_byte_ms / self._world_size)
        mean_ms = work_ms / self._world_size + (exchange_ms + self._prices.shard_ms)
        # A table may take its best width for all of its columns, in a fraction of a piece too: no
        # choice of widths has a lower price for each column (L4).
        whole_volume = columns.volume[shapes.whole]
        share = columns.volume / whole_volume[shapes.table]
        return Cuts(
            first=shapes.first[:-1],
            possible=shapes.possible,
            size_bytes=columns.size_bytes,
            piece_ms=self._piece_ms(columns, work_ms),
            work_ms=work_ms / share,
            mean_ms=mean_ms / share,
            every_rank_ms=self._least_prices.any_byte_ms * whole_volume,
        )

    def _cut_rows(self, blocks: BlockShapes) -> Cuts:
        """Price row blocks of every table, over any one of the groups of a size."""
        reduces = self._reduces(blocks)
        block_ms = self._compute.stand_alone_ms(blocks.block.vectors)
        last_ms = self._compute.stand_alone_ms(blocks.last.vectors)
        work_ms = (blocks.group_size - 1) * block_ms + last_ms
        reduce_ms = reduces.byte_ms * blocks.reduce_volume + reduces.shard_ms
        # the ranks of one group reduce and then exchange what they reduced
        exchange_ms = reduce_ms + blocks.block.volume * self._prices.even_byte_ms
        exchange_ms = exchange_ms / blocks.num_groups
        every_rank_ms = exchange_ms
        if not blocks.is_global:  # ranks outside the group do not reduce
            volume = blocks.block.volume
            every_rank_ms = self._least_prices.any_byte_ms * volume * blocks.group_size
        return Cuts(
            first=np.arange(len(work_ms)),
            possible=blocks.possible,
            size_bytes=blocks.block.size_bytes,
            piece_ms=self._piece_ms(blocks.block, block_ms),
            work_ms=work_ms,
            mean_ms=work_ms / self._world_size + exchange_ms,
            every_rank_ms=every_rank_ms,
        )

    def _replicate(self, shapes: BlockShapes, *, least_memory: int) -> Cuts:
        """Price replicas of every table; every rank pays for all of them (L10)."""
        work_ms = self._compute.stand_alone_ms(shapes.block.vectors)
        every_rank_ms = work_ms + self._prices.gradients.byte_ms * shapes.reduce_volume
        return Cuts(
            first=np.arange(len(work_ms)),
            possible=shapes.possible & (shapes.block.size_bytes <= least_memory),
            size_bytes=shapes.block.size_bytes,
            piece_ms=np.full(len(work_ms), self._launch_ms),
            work_ms=work_ms * self._world_size,
            mean_ms=every_rank_ms,
            every_rank_ms=every_rank_ms,
        )

    def _piece_ms(self, pieces: Pieces, work_ms: Floats) -> Floats:
        """Return [n], time of a rank with one piece: work, its own exchanges and launch (L5)."""
        own_ms = self._least_prices.own_byte_ms * pieces.volume
        return work_ms + own_ms + self._launch_ms

    def _reduces(self, blocks: BlockShapes) -> ReducePrices:
        return self._prices.reduces[blocks.group_size]


def _paid_by_every_rank_ms(kind: PlanKind) -> float:
    """Return the least time that every rank pays for all tables (L7, L10)."""
    num_tables = len(kind.cuts[0].every_rank_ms)
    least_ms = np.full(num_tables, np.inf)
    for cuts in kind.cuts:
        possible = np.logical_or.reduceat(cuts.possible, cuts.first)
        least_ms = np.minimum(least_ms, np.where(possible, cuts.every_rank_ms, np.inf))
    # a table that cannot be cut in any of these ways makes the mean infinite anyway
    return float(least_ms[np.isfinite(least_ms)].sum())
