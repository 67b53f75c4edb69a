"""Costs of the layouts of tables for the lower bound, and kinds of plans by the layouts they have.

Letters: T tables, n sizes of pieces, L layouts of a kind of plans, W ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.exchange_costs import ExchangeCosts, LeastExchangeCosts, ReduceCosts
from dlrm_sharded.cost.shapes import BlockShapes, Shapes
from dlrm_sharded.cost.workload import Floats, Indices, Mask

SEQUENCE_ROWS = "sequence_rows"
"""The layout `rows` of tables whose vectors are not pooled, which reduce nothing."""

MOST_LOADED = 4
"""Largest number of tables whose row blocks on one host each get their own kind of plans."""


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
        volume: [T], bytes that a rank exchanges with every other one for the table, summed over
            ranks.
        piece_volume: [n], bytes that the rank of a piece exchanges with every other one for it.
        fixed_ms: time of exchanges of this layout alone that does not depend on their bytes,
            averaged over ranks.
        group_size: number of ranks that each hold a block of the table; 1 for columns.
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

    @property
    def is_on_all_ranks(self) -> bool:
        """Tells whether every rank has a piece of every table; if not, an all-to-all is needed."""
        return self.layout not in ("columns", "host_rows")

    def without(self, tables: Mask) -> Cuts:
        """Return the layout without these tables [T]."""
        return dataclasses.replace(self, possible=self.possible & ~tables[self.table])

    def least(self, values: Floats | float, allowed: Mask) -> Floats:
        """Return [T], the least of values [n] over each table's allowed sizes; inf without any."""
        return np.minimum.reduceat(np.where(allowed, values, np.inf), self.first)

    def possible_ms(self) -> Floats:
        """Return [T], what every rank pays for a table; inf if it cannot have the layout."""
        possible = np.logical_or.reduceat(self.possible, self.first)
        return np.where(possible, self.every_rank_ms, np.inf)


class PlanKind:
    """Plans with tables in each of some layouts, which therefore have the same fixed costs (L8).

    Args:
        cuts: the layouts.
        all_to_all_ms: time of the all-to-alls that does not depend on volumes.
        num_modules: number of modules, each with its own lookups and exchanges (L15).
        loaded: the table whose row blocks on one host take a rank the longest; None if it is not
            known.

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
        on_all_ranks = [layout.fixed_ms for layout in cuts if layout.is_on_all_ranks]
        self.has_free_pieces = len(on_all_ranks) < len(cuts)
        all_to_alls = [all_to_all_ms] if self.has_free_pieces else []
        # Each module has at least one of the kind's exchanges, and each of these has a module.
        exchanges = [*on_all_ranks, *all_to_alls]
        fixed_ms = sum(all_to_alls) + max(num_modules - len(exchanges), 0) * min(exchanges)
        self.fixed_ms = fixed_ms + sum(layout.fixed_ms for layout in cuts)
        self.every_rank_fixed_ms = fixed_ms + sum(on_all_ranks)
        self.num_on_all_ranks = len(on_all_ranks)
        if not self.has_free_pieces:
            self.num_on_all_ranks = max(self.num_on_all_ranks, num_modules)
        self.every_rank_ms = np.stack([layout.possible_ms() for layout in cuts])
        sum_ms, excess_ms = least_of_layouts(self.every_rank_ms)
        self.least_ms = self.every_rank_fixed_ms + float(sum_ms)
        self.own_ms = excess_ms
        if self.least_ms < math.inf:
            # the table may be the one that its layout must have, at no excess
            self.own_ms = self.least_ms + excess_ms - excess_ms.min(axis=1, keepdims=True)


def by_loaded_table(
    cuts: Sequence[Cuts], all_to_all_ms: float, least_ms: float, num_modules: int
) -> Iterator[PlanKind]:
    """Yield kinds of plans with these layouts, by the table that loads one host most (L12).

    Args:
        least_ms: tables whose row blocks on one host take a rank less than this share a kind.
    """
    rest, layouts = list(cuts), [layout.layout for layout in cuts]
    if "host_rows" in layouts:
        place = layouts.index("host_rows")
        block_ms = np.where(cuts[place].possible, cuts[place].piece_ms, 0.0)
        for table in np.argsort(-block_ms, kind="stable")[:MOST_LOADED].tolist():
            if block_ms[table] < least_ms:
                break
            without = [layout.without(np.arange(len(block_ms)) == table) for layout in rest]
            has_it = [*without[:place], rest[place], *without[place + 1 :]]
            yield PlanKind(has_it, all_to_all_ms, num_modules=num_modules, loaded=table)
            rest[place] = without[place]
    yield PlanKind(rest, all_to_all_ms, num_modules=num_modules)


class CutCosts:
    """Costs of all layouts of the tables of a task.

    Attributes:
        exchange_costs: costs of exchanges near even volumes.
        least_costs: lower bounds of them for all volumes.
    """

    def __init__(self, costed: CostedTask) -> None:
        self._task, self._compute = costed.task, costed.compute
        self._world_size = costed.task.topology.world_size
        self.exchange_costs = ExchangeCosts.from_model(costed.communication, costed.hosts)
        self.least_costs = LeastExchangeCosts.from_model(costed.communication, costed.hosts)
        self._shapes = Shapes.from_task(
            costed.task, costed.compute, sequences=self.least_costs.sequences
        )

    def cuts(self) -> list[Cuts]:
        """Return column shards, row blocks on groups of each size, and replicas if allowed.

        Row blocks of sequences come after row blocks of pooled tables.
        """
        shapes, costs = self._shapes, self.exchange_costs
        memory = self._task.topology.rank_memory_bytes
        is_sequence = np.array([not table.pooled for table in self._task.tables])
        all_to_all = ReduceCosts(costs.fixed_ms, 0.0, 0.0)
        cuts, of_sequences = [self._in_columns(max(memory))], []
        for blocks in shapes.row_blocks:
            possible = blocks.possible & (blocks.block.size_bytes <= max(memory))
            reduces, pooled = costs.reduces[blocks.group_size], possible & ~is_sequence
            if not blocks.is_global:
                cuts.append(self._on_a_host(blocks, reduces, pooled))
                continue
            cuts.append(self._on_all_ranks("rows", blocks, reduces, pooled))
            if is_sequence.any():
                of_sequences.append(
                    self._on_all_ranks(SEQUENCE_ROWS, blocks, all_to_all, possible & is_sequence)
                )
        cuts += of_sequences
        if (blocks_of_all := shapes.replicas) is not None:
            possible = blocks_of_all.possible & (blocks_of_all.block.size_bytes <= min(memory))
            cuts.append(self._on_all_ranks("replicas", blocks_of_all, costs.gradients, possible))
        return cuts

    def _in_columns(self, capacity: int) -> Cuts:
        """Return costs of column shards of every width, and of whole tables in such shards."""
        shapes, columns, costs = self._shapes, self._shapes.columns, self.exchange_costs
        work_ms = self._compute.stand_alone_ms(columns.vectors)
        exchange_ms = columns.volume * (costs.even_byte_ms / self._world_size)
        mean_ms = work_ms / self._world_size + (exchange_ms + costs.shard_ms)
        # A table may take its best width for all of its columns, even if that leaves a fraction of
        # a piece: no choice of widths has a lower cost per column (L4).
        whole_volume = columns.volume[shapes.whole]
        share = shapes.num_cols / shapes.num_cols[shapes.whole][shapes.table]
        return Cuts(
            layout="columns",
            first=shapes.first[:-1],
            table=shapes.table,
            possible=(shapes.num_shards == 1) & (columns.size_bytes <= capacity),
            piece_ms=work_ms + self.least_costs.own_byte_ms * columns.volume,
            work_ms=work_ms / share,
            mean_ms=mean_ms / share,
            every_rank_ms=self.least_costs.any_byte_ms * whole_volume,
            volume=whole_volume,
            piece_volume=columns.volume,
        )

    def _on_all_ranks(
        self, layout: str, blocks: BlockShapes, reduces: ReduceCosts, possible: Mask
    ) -> Cuts:
        """Return the costs of a block of every table on every rank.

        Row blocks reduce their vectors, row blocks of sequences exchange them (L14), and replicas
        average gradients (L10).
        """
        size, own_byte_ms = self._world_size, self.least_costs.own_byte_ms
        volume, last_volume = blocks.block.volume, blocks.last.volume
        all_volume = (size - 1) * volume + last_volume
        block_ms, last_ms, work_ms = self._work_ms(blocks)
        least_ms = np.minimum(block_ms + own_byte_ms * volume, last_ms + own_byte_ms * last_volume)
        reduce_ms = reduces.byte_ms * blocks.reduce_volume + reduces.shard_ms
        shards_ms = size * self.exchange_costs.shard_ms if layout == SEQUENCE_ROWS else 0.0
        exchange_ms = all_volume * (self.exchange_costs.even_byte_ms / size) + shards_ms
        return Cuts(
            layout=layout,
            first=np.arange(len(work_ms)),
            table=np.arange(len(work_ms)),
            possible=possible,
            piece_ms=block_ms + own_byte_ms * volume - least_ms,
            work_ms=work_ms,
            mean_ms=work_ms / size + reduce_ms + exchange_ms,
            every_rank_ms=least_ms + reduce_ms + self.least_costs.any_byte_ms * all_volume,
            volume=all_volume,
            piece_volume=volume,
            fixed_ms=reduces.fixed_ms,
            group_size=size,
        )

    def _on_a_host(self, blocks: BlockShapes, reduces: ReduceCosts, possible: Mask) -> Cuts:
        """Return the costs of row blocks of every table over the ranks of any one host."""
        volume, num_groups = blocks.block.volume, blocks.num_groups
        block_ms, last_ms, work_ms = self._work_ms(blocks)
        reduce_ms = reduces.byte_ms * blocks.reduce_volume + reduces.shard_ms
        # the ranks of one group reduce and then exchange what they reduced; others do not reduce
        exchange_ms = (reduce_ms + volume * self.exchange_costs.even_byte_ms) / num_groups
        own_ms = reduces.fixed_ms + reduce_ms + self.least_costs.own_byte_ms * volume
        return Cuts(
            layout="host_rows",
            first=np.arange(len(work_ms)),
            table=np.arange(len(work_ms)),
            possible=possible,
            piece_ms=np.minimum(block_ms, last_ms) + own_ms,
            work_ms=work_ms,
            mean_ms=work_ms / self._world_size + exchange_ms,
            every_rank_ms=self.least_costs.any_byte_ms * volume * blocks.group_size,
            volume=volume * blocks.group_size,
            piece_volume=volume,
            fixed_ms=reduces.fixed_ms / num_groups,
            group_size=blocks.group_size,
        )

    def _work_ms(self, blocks: BlockShapes) -> tuple[Floats, Floats, Floats]:
        """Return [T] each, computation of a block, of the last block and of all in a group."""
        block_ms, last_ms = (
            self._compute.stand_alone_ms(piece.vectors) for piece in (blocks.block, blocks.last)
        )
        return block_ms, last_ms, (blocks.group_size - 1) * block_ms + last_ms


def least_of_layouts(values: Floats) -> tuple[Floats, Floats]:
    """Return the least sums [...] of values [..., L, T], and each value's excess over the least.

    In a sum, each table has one layout, and every layout has at least one table (L8).
    """
    least = values.min(axis=-2)
    is_any = np.isfinite(least).all(axis=-1)
    excess = values - np.where(np.isfinite(least), least, 0.0)[..., None, :]
    sums = least.sum(axis=-1) + excess.min(axis=-1).sum(axis=-1)
    return np.where(is_any, sums, np.inf), excess
