"""Tables split into pieces, so that a policy that places whole tables can fit all of them.

A piece is a range of a table's columns and is placed like a table. No piece is wider than a lookup
supports. Rows are split only into even blocks, one on each rank: there is nothing to place, and the
blocks take their memory first.

A piece fits no rank only if every rank has less free memory than the piece needs. So wherever the
other pieces are placed, a piece fits if it is no larger than the mean over ranks of the memory that
is left once all pieces are placed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_sharded.plans.layouts import (
    ColumnShards,
    RowBlocks,
    can_split_rows,
    column_widths,
    trained_layouts,
)
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

BY_ROWS = 0
"""Number of column pieces of a table that lies in row blocks on all ranks."""

LARGEST_PIECE = 0.4
"""First limit on the size of a piece, as a share of a rank's memory, which then holds two."""

NUM_HALVINGS = 6
"""How often that limit is halved; the last pieces fit ranks that are 99 % full."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """One way to split all tables of a task.

    Args:
        num_pieces: number of column pieces of each table, of nearly equal widths, or `BY_ROWS`.
    """

    task: ShardingTask
    num_pieces: tuple[int, ...]

    @property
    def pieces(self) -> tuple[Table, ...]:
        """The pieces to place, as tables with distinct names."""
        return tuple(
            dataclasses.replace(table, name=f"{i}.{j}: {table.name}", embedding_dim=width)
            for i, (table, num) in enumerate(zip(self.task.tables, self.num_pieces, strict=True))
            for j, width in enumerate(column_widths(table, num) if num != BY_ROWS else ())
        )

    @property
    def topology_of_pieces(self) -> Topology:
        """The topology for the pieces, which have the optimizers of their tables.

        A topology refuses ranks without memory; where none is left, it has one byte, in which no
        piece fits.
        """
        topology = self.task.topology
        pieces = self.pieces if topology.optimizer_bytes_by_table else ()
        return dataclasses.replace(
            topology,
            memory_bytes_by_rank=tuple(max(1, free) for free in self.free_bytes),
            optimizer_bytes_by_table={
                piece.name: topology.optimizer_bytes(piece.name.partition(": ")[2])
                for piece in pieces
            },
        )

    @property
    def free_bytes(self) -> tuple[int, ...]:
        """Memory of each rank that row blocks leave; negative if these do not fit."""
        topology = self.task.topology
        free = list(topology.rank_memory_bytes)
        for table, num in zip(self.task.tables, self.num_pieces, strict=True):
            for shard in self._row_blocks(table, num):
                free[shard.rank] -= shard.bytes_on(topology)
        return tuple(free)

    def _row_blocks(self, table: Table, num_pieces: int) -> list[Shard]:
        """Return the row blocks of a table that is split by rows; none for column pieces."""
        if num_pieces != BY_ROWS:
            return []
        return RowBlocks(range(self.task.topology.world_size)).shards(table)

    def spread(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """Return the ranks of pieces so that a table's pieces on a rank are not too wide together.

        Each piece beyond that width moves to the freest rank with memory for it; None if there is
        no such rank.

        Args:
            ranks: the rank of each of `pieces`.
        """
        topology, pieces = self.topology_of_pieces, self.pieces
        free, spread = list(self.free_bytes), list(ranks)
        for piece, rank in zip(pieces, ranks, strict=True):
            free[rank] -= topology.table_bytes(piece)
        start = 0
        for num in self.num_pieces:
            num_cols: Counter[int] = Counter()
            to_move = []
            for i in range(start, start + num):
                if num_cols[ranks[i]] + pieces[i].embedding_dim <= topology.max_shard_columns:
                    num_cols[ranks[i]] += pieces[i].embedding_dim
                else:
                    to_move.append(i)
            for i in to_move:
                width, size = pieces[i].embedding_dim, topology.table_bytes(pieces[i])
                free[ranks[i]] += size
                open_ranks = [
                    rank
                    for rank in range(topology.world_size)
                    if num_cols[rank] + width <= topology.max_shard_columns and free[rank] >= size
                ]
                if not open_ranks:
                    return None
                spread[i] = max(open_ranks, key=free.__getitem__)
                num_cols[spread[i]] += width
                free[spread[i]] -= size
            start += num
        return tuple(spread)

    def shards(self, ranks: Sequence[int]) -> tuple[Shard, ...]:
        """Return the shards of all tables; pieces of one table on one rank become one shard.

        Args:
            ranks: the rank of each of `pieces`, from `spread`.
        """
        shards: list[Shard] = []
        rank_of_piece = iter(ranks)
        for table, num in zip(self.task.tables, self.num_pieces, strict=True):
            shards += self._row_blocks(table, num)
            num_cols: Counter[int] = Counter()
            for width in column_widths(table, num) if num != BY_ROWS else ():
                num_cols[next(rank_of_piece)] += width
            shards += ColumnShards.shards(table, sorted(num_cols.items()))
        return tuple(shards)


def unsplit(task: ShardingTask) -> Splitting:
    """Return the splitting that leaves every table whole."""
    return Splitting(task, (1,) * len(task.tables))


def splittings(task: ShardingTask) -> Iterator[Splitting]:
    """Yield ever finer splittings, each to be tried if the one before did not fit.

    The first one splits only the tables that fit no rank or no lookup; the next ones split all
    tables larger than a limit that shrinks. Rows are split if no rank can hold 4 columns of a
    table, and as the last resort of each limit, if 4 columns exceed it.
    """
    topology = task.topology
    memory = topology.rank_memory_bytes
    largest_rank, mean = max(memory), sum(memory) / len(memory)
    limits = [LARGEST_PIECE * mean / 2**i for i in range(NUM_HALVINGS + 1)]
    coarsest = [
        1
        if topology.table_bytes(table) <= largest_rank
        and table.embedding_dim <= topology.max_shard_columns
        else _num_pieces(table, topology, limits[0], largest_rank)
        for table in task.tables
    ]
    finer = (
        [_num_pieces(table, topology, limit, max_four_columns) for table in task.tables]
        for limit in limits
        for max_four_columns in (largest_rank, limit)
    )
    seen = set()
    for num_pieces in itertools.chain([coarsest], finer):
        splitting = Splitting(task, tuple(num_pieces))
        if splitting.num_pieces not in seen:
            seen.add(splitting.num_pieces)
            yield splitting


def _num_pieces(table: Table, topology: Topology, limit: float, max_four_columns: float) -> int:
    """Return the number of pieces of at most `limit` bytes, or of 4 columns if these have more.

    No piece is wider than a lookup supports.

    Args:
        max_four_columns: the table is split by rows if 4 of its columns have more bytes than this,
            or all of them where columns are not split.
    """
    num_rows, may_split = table.num_embeddings, "columns" in trained_layouts(table, topology)
    narrowest = COLUMN_MULTIPLE if may_split else table.embedding_dim
    size = topology.shard_bytes(table.name, num_rows, narrowest, precision=table.precision)
    if size > max_four_columns and topology.world_size > 1 and can_split_rows(table, topology):
        return BY_ROWS
    if not may_split:
        return 1
    per_weight, per_row = topology.optimizer_bytes(table.name)
    row_bytes = limit / num_rows - per_row
    weight_bytes = TABLE_BYTES[table.precision] + per_weight
    num_cols = min(row_bytes / weight_bytes, topology.max_shard_columns)
    steps = max(1, int(num_cols / COLUMN_MULTIPLE))
    return -(-table.embedding_dim // (COLUMN_MULTIPLE * steps))
