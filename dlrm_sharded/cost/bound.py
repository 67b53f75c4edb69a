"""A lower bound of `PlanCost.cost_ms` over all plans of a task, under an additive cost model.

The slowest rank costs no less than the ranks do on average (L1), and the mean is nearly a sum over
the pieces into which the tables are cut, wherever these go: the work of a piece costs least on a
rank that reads nothing else (L2), and exchanges cost least on average where the ranks' volumes
are even (L3). So every table can take its cheapest pieces by itself (L4). A piece that alone makes
a rank cost more than T is in no plan of cost T, so a T that is lower than the mean of the cheapest
of the other pieces is lower than the cost of every plan (L5). A part of its cost every rank pays,
wherever the pieces are (L7, L10). The less that is, the more do the pieces cost, and the more that
is, the smaller are the pieces for which a rank has time; so each range of it has its own test
(L11).

docs/notes/lower_bound.md has the lemmas L1 to L11, their proofs and an example with numbers.

Letters: T tables, n sizes of pieces, L layouts of a kind of plans, W ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.exchange_prices import ExchangePrices, LeastExchangePrices
from dlrm_sharded.cost.shapes import BlockShapes, Indices, Shapes
from dlrm_sharded.cost.workload import Floats

Mask = NDArray[np.bool_]

NUM_BISECTIONS = 20
"""Steps of the bisection, which leave an interval of 2 ** -20 of the bound."""

LEAST_MS = 1e-6
"""Lowest cost, in ms, at which the search for an upper end of the interval starts."""

LEAST_ROOM_MS = 1e-9
"""Keeps the time that a rank has for its work above zero."""

RANGES_PER_OCTAVE = 16
"""Ranges of what every rank pays, between a time and twice that time."""

NUM_OCTAVES = 4
"""What every rank pays is told apart in ranges from the limit down to 2 ** -4 of it."""

WEIGHTS = (0.0, -1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Weights of what every rank pays, beside the mean over ranks, in the test of a range."""


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
        layout: one of `LAYOUTS`.
        first: [T], where each table's sizes of pieces begin.
        possible: [n], whether the pieces exist and fit the memory of some rank.
        piece_ms: [n], least time of a rank for a piece and its own exchanges, without the costs of
            every rank.
        work_ms: [n], computation of the whole table in such pieces, on all ranks together.
        mean_ms: [n], cost of the whole table in such pieces, averaged over ranks.
        every_rank_ms: [T], least time that every rank pays for the table.
        fixed_ms: time of reductions that does not depend on their bytes, averaged over ranks.
        is_on_all_ranks: whether every rank has a piece of every table.
        is_exchanged: whether ranks exchange vectors in an all-to-all.
    """

    layout: str
    first: Indices
    possible: Mask
    piece_ms: Floats
    work_ms: Floats
    mean_ms: Floats
    every_rank_ms: Floats
    fixed_ms: float = 0.0
    is_on_all_ranks: bool = False
    is_exchanged: bool = True

    def least(self, values: Floats, allowed: Mask) -> Floats:
        """Return [T], the least of values [n] over each table's allowed sizes; inf without any."""
        return np.minimum.reduceat(np.where(allowed, values, np.inf), self.first)

    def possible_ms(self) -> Floats:
        """Return [T], what every rank pays for a table; inf if it cannot have the layout."""
        possible = np.logical_or.reduceat(self.possible, self.first)
        return np.where(possible, self.every_rank_ms, np.inf)

    def per_size(self, values: Floats) -> Floats:
        """Return [n], values [T] of each size's table."""
        return np.repeat(values, np.diff(self.first, append=len(self.possible)))


class PlanKind:
    """Plans with tables in each of some layouts, which therefore have the same fixed costs (L8).

    Args:
        cuts: the layouts.
        all_to_all_ms: time of the all-to-alls that does not depend on volumes.

    Attributes:
        fixed_ms: time of exchanges that does not depend on volumes, averaged over ranks.
        every_rank_fixed_ms: the part of it that every rank pays.
        num_on_all_ranks: number of lookups that every rank launches.
        least_ms: the least that every rank pays, launches aside; inf if there is no plan.
        every_rank_ms: [L, T], what every rank pays for a table in each layout; inf if it has none.
        own_ms: [L, T], the least that every rank pays if the table has the layout.
    """

    def __init__(self, cuts: Sequence[Cuts], all_to_all_ms: float) -> None:
        self.cuts = tuple(cuts)
        fixed_ms = all_to_all_ms if any(layout.is_exchanged for layout in cuts) else 0.0
        self.fixed_ms = fixed_ms + sum(layout.fixed_ms for layout in cuts)
        self.every_rank_fixed_ms = fixed_ms + sum(
            layout.fixed_ms for layout in cuts if layout.is_on_all_ranks
        )
        self.num_on_all_ranks = sum(layout.is_on_all_ranks for layout in cuts)
        self.every_rank_ms = np.stack([layout.possible_ms() for layout in cuts])
        sum_ms, excess_ms = _least_of_layouts(self.every_rank_ms)
        self.least_ms = self.every_rank_fixed_ms + sum_ms
        self.own_ms = excess_ms
        if self.least_ms < math.inf:
            # a table of a layout may be the one that each layout must have
            self.own_ms = self.least_ms + excess_ms - excess_ms.min(axis=1, keepdims=True)

    @property
    def has_free_pieces(self) -> bool:
        """Return whether some pieces are on some ranks only."""
        return self.num_on_all_ranks < len(self.cuts)


class Relaxation:
    """A relaxed task, in which fractions of pieces may go anywhere, so that no plan is cheaper."""

    def __init__(self, priced: PricedTask) -> None:
        task, compute, hosts = priced.task, priced.compute, priced.hosts
        self._world_size = task.topology.world_size
        memory = task.topology.rank_memory_bytes
        self._capacity, self._too_large = max(memory), task.table_bytes > sum(memory)
        self._compute = compute
        self._prices = ExchangePrices.from_model(priced.communication, hosts)
        self._least_prices = LeastExchangePrices.from_model(priced.communication, hosts)
        shapes = Shapes.from_task(task, compute)
        self._cuts = [self._cut_columns(shapes)]
        self._cuts += [self._cut_rows(blocks) for blocks in shapes.row_blocks]
        if shapes.replicas is not None:
            self._cuts.append(self._replicate(shapes.replicas, least_memory=min(memory)))
        launch_ms = compute.launch_ms(np.arange(len(self._cuts) + 1.0))
        self._launch_ms: list[float] = launch_ms.sum(axis=1).tolist()

    def bound_ms(self, *, replicas: bool = True) -> float:
        """Return the lowest bound of all kinds of plans, or of those without replicas."""
        if self._too_large:
            return math.inf
        kinds = self.kinds(replicas=replicas)
        bound_ms = math.inf
        # Kinds with a low mean come first, as the others then need one test.
        for kind in sorted(kinds, key=lambda kind: self.mean_ms(math.inf, kind)):
            bound_ms = min(bound_ms, self.bound_of_kind_ms(kind, enough_ms=bound_ms))
        return bound_ms

    def kinds(self, *, replicas: bool = True) -> list[PlanKind]:
        """Return a kind of plans for each set of layouts that tables can have."""
        cuts = [layout for layout in self._cuts if replicas or layout.layout != "replicas"]
        cuts = [layout for layout in cuts if layout.possible.any()]
        return [
            PlanKind(some, self._prices.fixed_ms)
            for number in range(1, len(cuts) + 1)
            for some in itertools.combinations(cuts, number)
        ]

    def bound_of_kind_ms(self, kind: PlanKind, *, enough_ms: float = math.inf) -> float:
        """Return the largest cost found that no plan of a kind undercuts (L5).

        Args:
            enough_ms: a higher cost need not be found.
        """
        low = self.mean_ms(math.inf, kind)
        if low >= enough_ms or (enough_ms < math.inf and self.is_undercut_by_none(enough_ms, kind)):
            return enough_ms
        # `low` is M(inf) or has passed the test, so the end that the bisection returns is a bound
        high = max(low, LEAST_MS)
        while high < enough_ms and self.is_undercut_by_none(high, kind):
            low, high = high, 2.0 * high
        high = min(high, enough_ms)
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            if self.is_undercut_by_none(middle, kind):
                low = middle
            else:
                high = middle
        return low

    def is_undercut_by_none(self, limit_ms: float, kind: PlanKind) -> bool:
        """Return whether it is certain that all plans of a kind cost more than a limit (L5)."""
        if self.mean_ms(limit_ms, kind) > limit_ms:
            return True
        return kind.has_free_pieces and all(
            self.is_outside(limit_ms, kind, least_ms, most_ms)
            for least_ms, most_ms in _ranges(kind.least_ms, limit_ms)
        )

    def mean_ms(self, limit_ms: float, kind: PlanKind) -> float:
        """Return a lower bound of the ranks' mean cost in plans that cost `limit_ms` or less.

        It is inf if there is no such plan.
        """
        allowed, next_ms = self._allowed(limit_ms, kind), self._next_launch_ms(kind)
        sum_ms, _ = _least_of_layouts(self._means_ms(allowed, kind, 0.0))
        if sum_ms == math.inf or next_ms == 0.0:
            return sum_ms + self._fixed_ms(kind)
        # Ranks that hold pieces launch a lookup, and few of them cannot do all the work (L6).
        room_ms = max(limit_ms - self._launches_ms(kind) - kind.least_ms, LEAST_ROOM_MS)
        num_used = math.ceil(self._free_work_ms(allowed, kind) / room_ms)
        ceiled_ms = sum_ms + next_ms * min(num_used / self._world_size, 1.0)
        shared_ms, _ = _least_of_layouts(self._means_ms(allowed, kind, next_ms / room_ms))
        return max(ceiled_ms, shared_ms) + self._fixed_ms(kind)

    def is_outside(self, limit_ms: float, kind: PlanKind, least_ms: float, most_ms: float) -> bool:
        """Return whether no plan that costs the limit or less is within a range (L11).

        Args:
            least_ms, most_ms: what every rank pays in plans of the range, launches aside.
        """
        room_ms = limit_ms - self._launches_ms(kind) - least_ms
        if room_ms <= 0.0:
            return True
        allowed = self._allowed(limit_ms, kind, least_ms, most_ms)
        means_ms = self._means_ms(allowed, kind, self._next_launch_ms(kind) / room_ms)
        every_rank_ms = np.where(means_ms < np.inf, kind.every_rank_ms, 0.0)
        for weight in WEIGHTS:
            sum_ms, _ = _least_of_layouts(means_ms + weight * every_rank_ms)
            weighed_ms = sum_ms + self._fixed_ms(kind) + weight * kind.every_rank_fixed_ms
            if weighed_ms > limit_ms + weight * (most_ms if weight > 0.0 else least_ms):
                return True
        return False

    def _allowed(
        self, limit_ms: float, kind: PlanKind, least_ms: float = 0.0, most_ms: float = math.inf
    ) -> list[Mask]:
        """Return [n] for each layout of a kind, whether plans of cost `limit_ms` may have pieces.

        Args:
            least_ms, most_ms: what every rank pays in these plans, launches aside.
        """
        allowed = []
        for layout, own_ms in zip(kind.cuts, kind.own_ms, strict=True):
            paid_ms = np.where(own_ms > most_ms, np.inf, np.maximum(own_ms, least_ms))
            needed_ms = layout.piece_ms + layout.per_size(paid_ms) + self._launches_ms(kind)
            allowed.append(layout.possible & (needed_ms <= limit_ms))
        return allowed

    def _means_ms(self, allowed: Sequence[Mask], kind: PlanKind, work_launch: float) -> Floats:
        """Return [L, T], the least mean over ranks of each table in each layout; inf without any.

        Args:
            work_launch: launches of a ms of work, in ms, on ranks that have no other lookup.
        """
        means_ms = []
        for layout, mask in zip(kind.cuts, allowed, strict=True):
            launch = 0.0 if layout.is_on_all_ranks else work_launch / self._world_size
            means_ms.append(layout.least(layout.mean_ms + layout.work_ms * launch, mask))
        return np.stack(means_ms)

    def _free_work_ms(self, allowed: Sequence[Mask], kind: PlanKind) -> float:
        """Return the least work of the tables that cannot be on all ranks."""
        works_ms = np.stack(
            [
                layout.least(layout.work_ms * (not layout.is_on_all_ranks), mask)
                for layout, mask in zip(kind.cuts, allowed, strict=True)
            ]
        )
        return float(works_ms.min(axis=0).sum())

    def _launches_ms(self, kind: PlanKind) -> float:
        """Return the launches of a rank that has free pieces, if there are any."""
        return self._launch_ms[kind.num_on_all_ranks + kind.has_free_pieces]

    def _next_launch_ms(self, kind: PlanKind) -> float:
        """Return by how much the launches of such a rank are more than those of all ranks."""
        return self._launches_ms(kind) - self._launch_ms[kind.num_on_all_ranks]

    def _fixed_ms(self, kind: PlanKind) -> float:
        """Return the fixed costs of all ranks in the mean, with the launches of all of them."""
        return kind.fixed_ms + self._launch_ms[kind.num_on_all_ranks]

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
            layout="columns",
            first=shapes.first[:-1],
            possible=(shapes.num_shards == 1) & (columns.size_bytes <= self._capacity),
            piece_ms=work_ms + self._least_prices.own_byte_ms * columns.volume,
            work_ms=work_ms / share,
            mean_ms=mean_ms / share,
            every_rank_ms=self._least_prices.any_byte_ms * whole_volume,
        )

    def _cut_rows(self, blocks: BlockShapes) -> Cuts:
        """Price row blocks of every table, over any one of the groups of a size."""
        reduces, volume = self._prices.reduces[blocks.group_size], blocks.block.volume
        block_ms = self._compute.stand_alone_ms(blocks.block.vectors)
        last_ms = self._compute.stand_alone_ms(blocks.last.vectors)
        least_ms = np.minimum(block_ms, last_ms)
        work_ms = (blocks.group_size - 1) * block_ms + last_ms
        reduce_ms = reduces.byte_ms * blocks.reduce_volume + reduces.shard_ms
        # the ranks of one group reduce and then exchange what they reduced
        exchange_ms = (reduce_ms + volume * self._prices.even_byte_ms) / blocks.num_groups
        if blocks.is_global:
            every_rank_ms, piece_ms = reduce_ms + least_ms, block_ms - least_ms
        else:  # ranks outside the group do not reduce
            every_rank_ms = self._least_prices.any_byte_ms * volume * blocks.group_size
            own_ms = reduces.fixed_ms + reduce_ms + self._least_prices.own_byte_ms * volume
            piece_ms = least_ms + own_ms
        return Cuts(
            layout="rows" if blocks.is_global else "host_rows",
            first=np.arange(len(work_ms)),
            possible=blocks.possible & (blocks.block.size_bytes <= self._capacity),
            piece_ms=piece_ms,
            work_ms=work_ms,
            mean_ms=work_ms / self._world_size + exchange_ms,
            every_rank_ms=every_rank_ms,
            fixed_ms=reduces.fixed_ms / blocks.num_groups,
            is_on_all_ranks=blocks.is_global,
            is_exchanged=not blocks.is_global,
        )

    def _replicate(self, shapes: BlockShapes, *, least_memory: int) -> Cuts:
        """Price replicas of every table; every rank pays for all of them (L10)."""
        work_ms, gradients = (
            self._compute.stand_alone_ms(shapes.block.vectors),
            self._prices.gradients,
        )
        every_rank_ms = work_ms + gradients.byte_ms * shapes.reduce_volume
        return Cuts(
            layout="replicas",
            first=np.arange(len(work_ms)),
            possible=shapes.possible & (shapes.block.size_bytes <= least_memory),
            piece_ms=np.zeros(len(work_ms)),
            work_ms=work_ms * self._world_size,
            mean_ms=every_rank_ms,
            every_rank_ms=every_rank_ms,
            fixed_ms=gradients.fixed_ms,
            is_on_all_ranks=True,
            is_exchanged=False,
        )


def _least_of_layouts(values: Floats) -> tuple[float, Floats]:
    """Return the least sum over tables of values [L, T], and what is above each table's least.

    Every layout has a table, and each table has one layout (L11).
    """
    least = values.min(axis=0)
    if least.max() == math.inf:
        return math.inf, values
    excess = values - least
    return float(least.sum() + excess.min(axis=1).sum()), excess


def _ranges(least_ms: float, limit_ms: float) -> Iterator[tuple[float, float]]:
    """Yield ranges that cover all from `least_ms` to the limit, narrow ones near the limit.

    No edge depends on tables, and with a higher limit there are fewer edges below, so that neither
    fewer tables nor a higher limit let more be proved.
    """
    last = math.ceil(RANGES_PER_OCTAVE * math.log2(limit_ms))
    for edge in range(last - NUM_OCTAVES * RANGES_PER_OCTAVE, last + 1):
        edge_ms = 2.0 ** (edge / RANGES_PER_OCTAVE)
        if edge_ms > least_ms:
            yield least_ms, edge_ms
            least_ms = edge_ms
