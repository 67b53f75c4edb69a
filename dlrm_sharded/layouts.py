"""Layouts: the ways to split one table into shards that TorchRec can train.

A layout is a class that recognizes its shards and knows its name in TorchRec. Cost models price it
by the size of its group, the ranks that reduce partial results among each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlrm_sharded.errors import InvalidPlanError
from dlrm_sharded.plan import Interval, Shard
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import Topology


class Layout(Protocol):
    """A way to split one table into shards."""

    @property
    def group_size(self) -> int:
        """Number of ranks that reduce partial results among each other; 1 if none do."""

    def torchrec_type(self, topology: Topology) -> str:
        """Return the value of TorchRec's `ShardingType` for this layout."""


@dataclass(frozen=True, slots=True)
class ColumnShards:
    """Ranges of columns with all rows, on any ranks; a whole table is one such range.

    TorchRec fuses the lookups of one sharding type, so whole tables are declared column-wise too,
    and a rank looks all of them up with one kernel launch.
    """

    group_size: int = 1

    def torchrec_type(self, topology: Topology) -> str:
        return "column_wise"

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], table: Table, topology: Topology) -> ColumnShards:
        """Return the layout of shards that tile their table.

        Raises:
            InvalidPlanError: shards on one rank have different widths, which TorchRec would treat
                as equal.
        """
        widths: dict[int, set[int]] = defaultdict(set)
        for shard in shards:
            widths[shard.rank].add(shard.num_cols)
        for rank, rank_widths in widths.items():
            if len(rank_widths) > 1:
                raise InvalidPlanError(
                    f"table {table.name!r} has column shards of the widths {sorted(rank_widths)} "
                    f"on rank {rank}; TorchRec trains several shards of a table on one rank only "
                    "at equal width; merge them into one shard"
                )
        return cls()


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Even blocks of rows at the full width, one on each rank of a group, in rank order.

    Args:
        ranks: all ranks of the job, or those of one host.
    """

    ranks: range

    @property
    def group_size(self) -> int:
        return len(self.ranks)

    def torchrec_type(self, topology: Topology) -> str:
        return "row_wise" if self.group_size == topology.world_size else "table_row_wise"

    def is_possible(self, table: Table) -> bool:
        """Return whether every rank of the group gets a row; FBGEMM trains no empty block."""
        return len(row_blocks(table.num_embeddings, self.group_size)) == self.group_size

    def shards(self, table: Table) -> list[Shard]:
        """Return the blocks of a table, for which they must be possible."""
        blocks = row_blocks(table.num_embeddings, self.group_size)
        cols = (0, table.embedding_dim)
        return [
            Shard(table.name, rank, rows, cols)
            for rank, rows in zip(self.ranks, blocks, strict=True)
        ]

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], table: Table, topology: Topology) -> RowBlocks:
        """Return the layout of shards that split rows and tile their table.

        Raises:
            InvalidPlanError: columns are split too, or the blocks are not even or not in order.
        """
        if any(shard.num_cols < table.embedding_dim for shard in shards):
            raise InvalidPlanError(
                f"table {table.name!r} is split by rows and by columns; TorchRec trains row blocks "
                "only at the full width"
            )
        placed = sorted(shards, key=lambda shard: shard.rank)
        for size in topology.group_sizes:
            first = placed[0].rank - placed[0].rank % size
            layout = cls(range(first, first + size))
            if layout.is_possible(table) and layout.shards(table) == placed:
                return layout
        rows = ", ".join(f"rank {s.rank}: [{s.rows[0]}, {s.rows[1]})" for s in placed)
        height = row_blocks(table.num_embeddings, topology.world_size)[0][1]
        raise InvalidPlanError(
            f"table {table.name!r} is split by rows as {rows}; TorchRec trains only even blocks "
            f"of {height:,} rows over all {topology.world_size} ranks in rank order, or even "
            f"blocks over the {topology.ranks_per_host} ranks of one host, none of them empty"
        )


def layout_of(shards: Sequence[Shard], table: Table, topology: Topology) -> Layout:
    """Return the layout of the shards that tile a table.

    Raises:
        InvalidPlanError: they have no layout that TorchRec trains.
    """
    kind = RowBlocks if is_row_wise(shards, table) else ColumnShards
    return kind.from_shards(shards, table, topology)


def can_split_rows(table: Table, topology: Topology) -> bool:
    """Return whether row blocks of the table on all ranks can be trained.

    Every rank needs a row, and row blocks are as wide as the table.
    """
    fits_lookup = table.embedding_dim <= topology.max_shard_columns
    return fits_lookup and RowBlocks(range(topology.world_size)).is_possible(table)


def is_row_wise(shards: Sequence[Shard], table: Table) -> bool:
    """Return whether a table's shards split its rows."""
    return any(shard.num_rows < table.num_embeddings for shard in shards)


def row_blocks(num_embeddings: int, num_blocks: int) -> list[Interval]:
    """Return the even blocks of rows that TorchRec trains, ceil(rows / blocks) in all but the last.

    There are fewer than `num_blocks` if no rows are left for the last ones.
    """
    height = block_height(num_embeddings, num_blocks)
    return [
        (start, min(start + height, num_embeddings)) for start in range(0, num_embeddings, height)
    ]


def block_height(num_embeddings: int, num_blocks: int) -> int:
    """Return the number of rows of every block but the last."""
    return -(-num_embeddings // num_blocks)


def column_widths(table: Table, num_pieces: int) -> list[int]:
    """Return nearly even numbers of columns, all multiples of 4, the larger ones first."""
    steps, wider = divmod(table.embedding_dim // COLUMN_MULTIPLE, num_pieces)
    return [COLUMN_MULTIPLE * (steps + (piece < wider)) for piece in range(num_pieces)]
