"""Layouts of tables as the lower bound prices them, and kinds of plans by the layouts they have.

Letters: T tables, n sizes of pieces, L layouts of a kind of plans, W ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.exchange_prices import ExchangePrices, LeastExchangePrices
from dlrm_sharded.cost.shapes import BlockShapes, Shapes
from dlrm_sharded.cost.workload import Floats, Indices, owners

Mask = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)


SEQUENCE_ROWS = "sequence_rows"
"""The layout `rows` of tables whose vectors are not pooled, which reduce nothing."""

MOST_LOADED = 4
"""Largest number of tables for whose row blocks on one host there is a kind of plans each."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ways to lay out tables in pieces of one kind: columns, row blocks on groups of one size, row
    blocks of sequences, or replicas.

    Args:
        layout: one of `LAYOUTS`, or `SEQUENCE_ROWS`.
        first: [T], where each table's sizes of pieces begin.
        table: [n], the table of each size.
        possible: [n], whether the pieces exist and fit the memory of some rank.
        piece_ms: [n], least time of a rank for a piece and its own exchanges, without the costs of
            every rank.
        work_ms: [n], computation of the whole table in such pieces, on all ranks together.
        mean_ms: [n], cost of the whole table in such pieces, averaged over ranks.
        every_rank_ms: [T], least time that every rank pays for the table.
        volume: [T], bytes of the table that ranks exchange with every other rank, on all of them.
        piece_volume: [n], bytes that the rank of a piece exchanges with every other one for it.
        fixed_ms: time of exchanges of this layout alone that does not depend on their bytes,
            averaged over ranks.
        group_size: ranks of a group that has row blocks; 1 for columns.
        is_on_all_ranks: whether every rank has a piece of every table.
        is_exchanged: whether ranks exchange vectors in the all-to-all that columns have.
    """

    layout: str
    first: Indices
    table: Indices
    possible: Mask
    piece_ms: Floats
    work_ms: Floats
    mean_ms: Floats
    every_rank_ms: Floats
    volume: Floats
    piece_volume: Floats
    fixed_ms: float = 0.0
    group_size: int = 1
    is_on_all_ranks: bool = False
    is_exchanged: bool = True

    def without(self, tables: Mask) -> Cuts:
        """Return the layout without these tables [T]."""
        return dataclasses.replace(self, possible=self.possible & ~self.per_size(tables))

    def least(self, values: Floats | float, allowed: Mask) -> Floats:
        """Return [T], the least of values [n] over each table's allowed sizes; inf without any."""
        return np.minimum.reduceat(np.where(allowed, values, np.inf), self.first)

    def possible_ms(self) -> Floats:
        """Return [T], what every rank pays for a table; inf if it cannot have the layout."""
        possible = np.logical_or.reduceat(self.possible, self.first)
        return np.where(possible, self.every_rank_ms, np.inf)

    def per_size(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return [n], values [T] of each size's table."""
        return values[self.table]


class PlanKind:
    """Plans with tables in each of some layouts, which therefore have the same fixed costs (L8).

    Args:
        cuts: the layouts.
        all_to_all_ms: time of the all-to-alls that does not depend on volumes.
        num_modules: number of modules with lookups and exchanges of their own (L15).
        loaded: a table whose row blocks on one host take a rank longer than those of any other
            table; None if it is not known.

    Attributes:
        fixed_ms: time of exchanges that does not depend on volumes, averaged over ranks.
        every_rank_fixed_ms: the part of it that every rank pays.
        has_free_pieces: whether some pieces are on some ranks only.
        num_on_all_ranks: least number of lookups that every rank launches.
        least_ms: the least that every rank pays, launches aside; inf if there is no plan.
        every_rank_ms: [L, T], what every rank pays for a table in each layout; inf if it has none.
        own_ms: [L, T], the least that every rank pays if the table has the layout.
    """

    def __init__(
        self,
        cuts: Sequence[Cuts],
        all_to_all_ms: float,
        *,
        num_modules: int = 1,
        loaded: int | None = None,
    ) -> None:
        self.cuts, self.loaded = tuple(cuts), loaded
        fixed_ms = all_to_all_ms if any(layout.is_exchanged for layout in cuts) else 0.0
        on_all_ranks = [layout.fixed_ms for layout in cuts if layout.is_on_all_ranks]
        # Each module has one of the kind's exchanges at least, and each of these has a module.
        exchanges = [*on_all_ranks, *([all_to_all_ms] if len(on_all_ranks) < len(cuts) else [])]
        fixed_ms += max(num_modules - len(exchanges), 0) * min(exchanges)
        self.fixed_ms = fixed_ms + sum(layout.fixed_ms for layout in cuts)
        self.every_rank_fixed_ms = fixed_ms + sum(on_all_ranks)
        self.has_free_pieces = len(on_all_ranks) < len(cuts)
        self.num_on_all_ranks = len(on_all_ranks)
        if not self.has_free_pieces:
            self.num_on_all_ranks = max(self.num_on_all_ranks, num_modules)
        self.every_rank_ms = np.stack([layout.possible_ms() for layout in cuts])
        sum_ms, excess_ms = least_of_layouts(self.every_rank_ms)
        self.least_ms = self.every_rank_fixed_ms + float(sum_ms)
        self.own_ms = excess_ms
        if self.least_ms < math.inf:
            # a table of a layout may be the one that each layout must have
            self.own_ms = self.least_ms + excess_ms - excess_ms.min(axis=1, keepdims=True)


def by_loaded_table(
    cuts: Sequence[Cuts], all_to_all_ms: float, least_ms: float, num_modules: int
) -> Iterator[PlanKind]:
    """Yield the kind of plans with these layouts, apart by the table that loads a host most (L12).

    Args:
        least_ms: row blocks on one host that take a rank less than that are not told apart.
    """
    rest = list(cuts)
    place = next((i for i, layout in enumerate(cuts) if layout.layout == "host_rows"), None)
    if place is not None:
        in_rows = cuts[place]
        block_ms = np.where(in_rows.possible, in_rows.piece_ms, 0.0)
        for table in np.argsort(-block_ms, kind="stable")[:MOST_LOADED].tolist():
            if block_ms[table] < least_ms:
                break
            is_table = np.arange(len(block_ms)) == table
            yield PlanKind(
                [
                    layout if i == place else layout.without(is_table)
                    for i, layout in enumerate(rest)
                ],
                all_to_all_ms,
                num_modules=num_modules,
                loaded=table,
            )
            rest[place] = rest[place].without(is_table)
    yield PlanKind(rest, all_to_all_ms, num_modules=num_modules)


class CutPricer:
    """Prices all layouts of the tables of a task."""

    def __init__(self, priced: PricedTask) -> None:
        task, hosts = priced.task, priced.hosts
        self._world_size = task.topology.world_size
        self._memory = task.topology.rank_memory_bytes
        self._capacity = max(self._memory)
        self._compute = priced.compute
        self._prices = ExchangePrices.from_model(priced.communication, hosts)
        self._least_prices = LeastExchangePrices.from_model(priced.communication, hosts)
        self._shapes = Shapes.from_task(
            task, priced.compute, sequences=self._least_prices.sequences
        )
        self._dims = np.array([table.embedding_dim for table in task.tables])
        self._is_sequence = np.array([not table.pooled for table in task.tables])
        self.num_modules = int(owners(task.tables).max()) + 1

    @property
    def all_to_all_ms(self) -> float:
        """Return the time of the all-to-alls that does not depend on volumes."""
        return self._prices.fixed_ms

    @property
    def busiest_byte_ms(self) -> float:
        """Return the time that every rank pays for a byte of the largest volume of a rank."""
        return self._least_prices.busiest_byte_ms

    def cuts(self) -> list[Cuts]:
        """Return column shards, row blocks on groups of each size, and replicas if there may be.

        Row blocks of sequences follow those of pooled tables.
        """
        shapes = self._shapes
        cuts = [self._cut_columns(shapes)]
        cuts += [self._cut_rows(blocks) for blocks in shapes.row_blocks]
        if self._is_sequence.any():
            cuts += [self._cut_sequences(rows) for rows in shapes.row_blocks if rows.is_global]
        if shapes.replicas is not None:
            cuts.append(self._replicate(shapes.replicas, least_memory=min(self._memory)))
        return cuts

    def _cut_columns(self, shapes: Shapes) -> Cuts:
        """Price column shards of every width, and whole tables in shards of equal widths."""
        columns = shapes.columns
        work_ms = self._compute.stand_alone_ms(columns.vectors)
        exchange_ms = columns.volume * (self._prices.even_byte_ms / self._world_size)
        mean_ms = work_ms / self._world_size + (exchange_ms + self._prices.shard_ms)
        # A table may take its best width for all of its columns, in a fraction of a piece too: no
        # choice of widths has a lower price for each column (L4).
        whole_volume = columns.volume[shapes.whole]
        width = np.arange(len(shapes.table)) - shapes.first[shapes.table] + 1
        dims = self._dims[shapes.table]
        share = np.minimum(width * shapes.step[shapes.table], dims) / dims
        return Cuts(
            layout="columns",
            first=shapes.first[:-1],
            table=shapes.table,
            possible=(shapes.num_shards == 1) & (columns.size_bytes <= self._capacity),
            piece_ms=work_ms + self._least_prices.own_byte_ms * columns.volume,
            work_ms=work_ms / share,
            mean_ms=mean_ms / share,
            every_rank_ms=self._least_prices.any_byte_ms * whole_volume,
            volume=whole_volume,
            piece_volume=columns.volume,
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
            table=np.arange(len(work_ms)),
            possible=self._possible(blocks) & ~self._is_sequence,
            piece_ms=piece_ms,
            work_ms=work_ms,
            mean_ms=work_ms / self._world_size + exchange_ms,
            every_rank_ms=every_rank_ms,
            volume=volume * blocks.group_size,
            piece_volume=volume,
            fixed_ms=reduces.fixed_ms / blocks.num_groups,
            group_size=blocks.group_size,
            is_on_all_ranks=blocks.is_global,
            is_exchanged=not blocks.is_global,
        )

    def _cut_sequences(self, blocks: BlockShapes) -> Cuts:
        """Price row blocks over all ranks whose vectors are exchanged and not reduced (L14)."""
        size, volume, last_volume = self._world_size, blocks.block.volume, blocks.last.volume
        prices, own_byte_ms = self._prices, self._least_prices.own_byte_ms
        block_ms = self._compute.stand_alone_ms(blocks.block.vectors)
        last_ms = self._compute.stand_alone_ms(blocks.last.vectors)
        least_ms = np.minimum(block_ms + own_byte_ms * volume, last_ms + own_byte_ms * last_volume)
        work_ms, all_volume = (size - 1) * block_ms + last_ms, (size - 1) * volume + last_volume
        exchange_ms = all_volume * (prices.even_byte_ms / size) + size * prices.shard_ms
        return Cuts(
            layout=SEQUENCE_ROWS,
            first=np.arange(len(work_ms)),
            table=np.arange(len(work_ms)),
            possible=self._possible(blocks) & self._is_sequence,
            piece_ms=block_ms + own_byte_ms * volume - least_ms,
            work_ms=work_ms,
            mean_ms=work_ms / size + exchange_ms,
            every_rank_ms=least_ms + self._least_prices.any_byte_ms * all_volume,
            volume=all_volume,
            piece_volume=volume,
            fixed_ms=prices.fixed_ms,
            group_size=size,
            is_on_all_ranks=True,
            is_exchanged=False,
        )

    def _possible(self, blocks: BlockShapes) -> Mask:
        """Return [T], whether row blocks exist and fit the memory of some rank."""
        possible: Mask = blocks.possible & (blocks.block.size_bytes <= self._capacity)
        return possible

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
            table=np.arange(len(work_ms)),
            possible=shapes.possible & (shapes.block.size_bytes <= least_memory),
            piece_ms=np.zeros(len(work_ms)),
            work_ms=work_ms * self._world_size,
            mean_ms=every_rank_ms,
            every_rank_ms=every_rank_ms,
            volume=np.zeros(len(work_ms)),
            piece_volume=np.zeros(len(work_ms)),
            fixed_ms=gradients.fixed_ms,
            is_on_all_ranks=True,
            is_exchanged=False,
        )


def least_of_layouts(values: Floats) -> tuple[Floats, Floats]:
    """Return the least sums [...] over tables of values [..., L, T], and what is above each least.

    Every layout has a table, and each table has one layout (L11).
    """
    least = values.min(axis=-2)
    is_any = np.isfinite(least).all(axis=-1)
    excess = values - np.where(np.isfinite(least), least, 0.0)[..., None, :]
    sums = least.sum(axis=-1) + excess.min(axis=-1).sum(axis=-1)
    return np.where(is_any, sums, np.inf), excess
