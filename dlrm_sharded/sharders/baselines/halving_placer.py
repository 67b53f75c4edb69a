"""Greedy placement that splits the busiest table again and again.

Pieces of tables are placed in descending order of the load that they add to a rank, each on the
least loaded rank or group of ranks that has memory for it. Then the table with the busiest piece is
split once more, and all pieces are placed anew. The best of all these placements is the plan.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.plans.layouts import RowBlocks, column_widths, row_layout, trained_layouts
from dlrm_sharded.plans.plan import Interval, Shard
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import Topology


@dataclass(frozen=True, slots=True)
class Split:
    """How one table is split.

    Args:
        num_pieces: number of ranges of columns, each on one rank.
        group_size: number of ranks that hold row blocks of the table; 1 if only columns are split.
    """

    num_pieces: int = 1
    group_size: int = 1


ShardLoad = Callable[[float, int, float, float], float]
"""Returns the price of a shard from its ids per sample, its columns, its share of the table's
columns, and the price of its exchange in ids."""


@dataclass(frozen=True, slots=True)
class SplitRules:
    """States what a planner does with one table.

    Args:
        on_hosts: whether hosts are the buckets for tables, or else ranks.
        min_partition: smallest width to which columns are halved.
        price: price of a shard.
        exchange_ids: price of a shard's exchange, in ids.
    """

    topology: Topology
    on_hosts: bool
    min_partition: int
    price: ShardLoad
    exchange_ids: float

    def first(self, table: Table) -> Split:
        """Return the coarsest split: row blocks on a host, or the fewest pieces lookups support."""
        in_one_host = Split(group_size=self.topology.ranks_per_host)
        if self.on_hosts and self.can_be(table, in_one_host):
            return in_one_host
        return Split(num_pieces=-(-table.embedding_dim // self.topology.max_shard_columns))

    def finer(self, table: Table, split: Split) -> Split | None:
        """Return halved columns, or else row blocks on the next larger group; None at the end."""
        halved = Split(num_pieces=2 * split.num_pieces)
        narrowest = table.embedding_dim // COLUMN_MULTIPLE // halved.num_pieces * COLUMN_MULTIPLE
        if (
            not self.on_hosts
            and "columns" in trained_layouts(table, self.topology)
            and split.group_size == 1
            and halved.num_pieces <= self.topology.world_size
            and narrowest >= self.min_partition
        ):
            return halved
        for group_size in sorted(self.topology.group_sizes):
            larger = Split(group_size=group_size)
            if group_size > split.group_size and self.can_be(table, larger):
                return larger
        return None

    def load(self, table: Table, num_cols: int, group_size: int) -> float:
        """Return the load that a piece adds to each of its ranks: to those of a host together."""
        together = self.topology.ranks_per_host if self.on_hosts else 1
        num_ids = table.pooling_factor * together / group_size
        return self.price(num_ids, num_cols, num_cols / table.embedding_dim, self.exchange_ids)

    def can_be(self, table: Table, split: Split) -> bool:
        """Return whether TorchRec trains the table's row blocks on groups of ranks."""
        return (
            split.group_size > 1
            and table.embedding_dim <= self.topology.max_shard_columns
            and row_layout(split.group_size, self.topology) in trained_layouts(table, self.topology)
            and RowBlocks(range(split.group_size)).is_possible(table)
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a table's columns.

    Args:
        load: what it adds to each rank of its group.
    """

    table: Table
    cols: Interval
    group_size: int
    load: float

    def shards(self, group: int) -> list[Shard]:
        """Return the shards on the group of a number: on one rank, or row blocks on several."""
        first = group * self.group_size
        if self.group_size > 1:
            return RowBlocks(range(first, first + self.group_size)).shards(self.table)
        return [dataclasses.replace(Shard.whole(self.table, first), cols=self.cols)]


@dataclass(frozen=True, slots=True)
class _Placement:
    """Pieces on ranks.

    Args:
        pieces: all pieces, in descending order of their load.
        misfit: the first table with a piece that fits nowhere; None if all pieces are placed.
        max_load: highest load of a rank.
    """

    splits: Mapping[str, Split]
    pieces: Sequence[_Piece]
    shards: Sequence[Shard]
    misfit: Table | None
    max_load: float

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Lowest for the best placement."""
        return self.misfit is not None, self.max_load


@dataclass(frozen=True, slots=True)
class Placer:
    """Places tables by the rules of a planner.

    Args:
        free: [W], memory of each rank.
    """

    tables: Sequence[Table]
    topology: Topology
    free: np.ndarray[tuple[int], np.dtype[np.int64]]
    rules: SplitRules

    def best_shards(self, num_placements: int) -> Sequence[Shard] | None:
        """Return the shards of the best placement; None if none fits."""
        first = {table.name: self.rules.first(table) for table in self.tables}
        placement = best = self._place(first)
        for _ in range(num_placements - 1):
            finer = self._split_once(placement)
            if finer is None:
                break
            placement = finer
            best = min(best, placement, key=lambda p: p.sort_key)
        best = min(best, self._place(self._even(first)), key=lambda p: p.sort_key)
        return None if best.misfit else best.shards

    def _even(self, first: Mapping[str, Split]) -> dict[str, Split]:
        """Return row blocks on all ranks for every table that allows them."""
        rows = Split(group_size=self.topology.world_size)
        return {
            table.name: rows if self.rules.can_be(table, rows) else first[table.name]
            for table in self.tables
        }

    def _split_once(self, placement: _Placement) -> _Placement | None:
        """Split the table that fits nowhere, or else the busiest one that can be split."""
        misfit = placement.misfit
        for table in [misfit] if misfit else [piece.table for piece in placement.pieces]:
            finer = self.rules.finer(table, placement.splits[table.name])
            if finer is not None:
                return self._place({**placement.splits, table.name: finer})
        return None

    def _place(self, splits: Mapping[str, Split]) -> _Placement:
        pieces = [piece for table in self.tables for piece in self._pieces(table, splits)]
        pieces.sort(key=lambda piece: (-piece.load, -num_weights(piece.table)))
        load, free, shards = np.zeros(len(self.free)), self.free.copy(), list[Shard]()
        groups_of_table: dict[str, list[int]] = defaultdict(list)
        misfit = None
        for piece in pieces:
            size = piece.shards(0)[0].bytes_on(self.topology)
            group_load = load.reshape(-1, piece.group_size).max(axis=1)
            group_free = free.reshape(-1, piece.group_size).min(axis=1)
            fits = group_free >= size
            # two pieces of one table on a rank would be one wider piece
            fits[groups_of_table[piece.table.name]] = False
            if not fits.any():
                misfit = piece.table
                break
            lowest = np.flatnonzero(fits & (group_load == group_load[fits].min()))
            group = int(lowest[group_free[lowest].argmax()])
            groups_of_table[piece.table.name].append(group)
            shards += piece.shards(group)
            ranks = slice(group * piece.group_size, (group + 1) * piece.group_size)
            load[ranks] += piece.load
            free[ranks] -= size
        return _Placement(splits, pieces, shards, misfit, float(load.max()))

    def _pieces(self, table: Table, splits: Mapping[str, Split]) -> list[_Piece]:
        split, pieces, start = splits[table.name], list[_Piece](), 0
        for width in column_widths(table, split.num_pieces):
            load = self.rules.load(table, width, split.group_size)
            pieces.append(_Piece(table, (start, start + width), split.group_size, load))
            start += width
        return pieces


def num_weights(table: Table) -> int:
    """Return the number of weights of a table."""
    return table.num_embeddings * table.embedding_dim
