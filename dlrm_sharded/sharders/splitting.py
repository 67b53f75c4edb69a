"""Tables cut into pieces, so that who places whole tables finds room for all of them.

A piece has some columns of a table, and is placed like a table of its own. Rows are cut only into
even blocks, one on each rank: there is nothing to place, and the blocks take their memory first.

No rank has room for a piece only if all have less free than it needs. So whatever is placed where,
there is always room if no piece is larger than all that is left in the end, divided by the ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_sharded.layouts import RowBlocks, column_widths
from dlrm_sharded.plan import Shard
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import ShardingTask, Topology

BY_ROWS = 0
"""Number of column pieces of a table that is cut into row blocks on all ranks instead."""

LARGEST_PIECE = 0.4
"""Of a rank's memory: there is room for two."""

NUM_HALVINGS = 6
"""Of that share, before there is no finer cut: pieces then suit ranks that are 99 % full."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tables of a task are cut.

    Args:
        parts: of each table, into how many nearly even pieces its columns are cut, or `BY_ROWS`.
    """

    task: ShardingTask
    parts: tuple[int, ...]

    @property
    def pieces(self) -> tuple[Table, ...]:
        """What is to be placed, as tables with names of their own."""
        return tuple(
            dataclasses.replace(table, name=f"{i}.{j}: {table.name}", embedding_dim=width)
            for i, (table, parts) in enumerate(zip(self.task.tables, self.parts, strict=True))
            for j, width in enumerate(column_widths(table, parts) if parts != BY_ROWS else ())
        )

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """What each rank has for pieces; less than nothing where it has no room for row blocks."""
        topology = self.task.topology
        left = list(topology.rank_memory_bytes)
        for table, parts in zip(self.task.tables, self.parts, strict=True):
            for shard in _row_blocks(topology).shards(table) if parts == BY_ROWS else ():
                left[shard.rank] -= shard.bytes_on(topology)
        return tuple(left)

    def shards(self, ranks: Sequence[int]) -> tuple[Shard, ...]:
        """The shards of all tables; pieces of a table that share a rank are one.

        Args:
            ranks: of each of `pieces`.
        """
        shards: list[Shard] = []
        rank_of_piece = iter(ranks)
        for table, parts in zip(self.task.tables, self.parts, strict=True):
            if parts == BY_ROWS:
                shards += _row_blocks(self.task.topology).shards(table)
                continue
            num_cols: Counter[int] = Counter()
            for width in column_widths(table, parts):
                num_cols[next(rank_of_piece)] += width
            start = 0
            for rank, width in sorted(num_cols.items()):
                cols = (start, start + width)
                shards.append(Shard(table.name, rank, (0, table.num_embeddings), cols))
                start += width
        return tuple(shards)


def whole(task: ShardingTask) -> Cut:
    """Nothing is cut."""
    return Cut(task, (1,) * len(task.tables))


def cuts(task: ShardingTask) -> Iterator[Cut]:
    """Ever finer ones, each to be tried where the one before had no room.

    At first the tables that fit no rank are cut, then all that are larger than ever smaller pieces.
    Rows are cut where no rank holds 4 columns of them, and as a last resort for each size of pieces
    where 4 columns are larger.
    """
    topology = task.topology
    memory = topology.rank_memory_bytes
    most, mean = max(memory), sum(memory) / len(memory)
    limits = [LARGEST_PIECE * mean / 2**i for i in range(NUM_HALVINGS + 1)]
    first = [
        1 if topology.table_bytes(table) <= most else _parts(table, topology, limits[0], most)
        for table in task.tables
    ]
    finer = (
        [_parts(table, topology, limit, most_of_columns) for table in task.tables]
        for limit in limits
        for most_of_columns in (most, limit)
    )
    seen = set()
    for parts in itertools.chain([first], finer):
        cut = Cut(task, tuple(parts))
        if cut.parts not in seen:
            seen.add(cut.parts)
            yield cut


def _parts(table: Table, topology: Topology, limit: float, most_of_columns: float) -> int:
    """Pieces of at most `limit` bytes, or of 4 columns where these have more than that.

    Args:
        most_of_columns: bytes of 4 columns, beyond which rows are cut.
    """
    num_rows = table.num_embeddings
    if (
        topology.shard_bytes(num_rows, COLUMN_MULTIPLE) > most_of_columns
        and topology.world_size > 1
        and _row_blocks(topology).is_possible(table)
    ):
        return BY_ROWS
    row_bytes = limit / num_rows - topology.optimizer_bytes_per_row
    steps = max(1, int(row_bytes / (COLUMN_MULTIPLE * topology.bytes_per_element)))
    return -(-table.embedding_dim // (COLUMN_MULTIPLE * steps))


def _row_blocks(topology: Topology) -> RowBlocks:
    return RowBlocks(range(topology.world_size))
