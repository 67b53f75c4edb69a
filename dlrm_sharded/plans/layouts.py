"""Layouts: the ways to split one table into shards that TorchRec can train.

A layout is a class that recognizes its shards and knows its name in TorchRec. Cost models predict
its time from the size of its group, the ranks that reduce partial results among each other.

TorchRec replicates a table only on all ranks. One replica per host, split into row blocks, would
need its two-dimensional parallelism, which treats all tables of a model alike: there is no such
layout.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.plan import Interval, Shard
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, LAYOUTS, Table
from dlrm_sharded.plans.task import Topology

OTHER_LAYOUTS = "keep it whole or in row blocks on all ranks (sharder=search does)"
"""Messages on a layout that a sequence table cannot have end with this advice."""

LAYOUT_NAMES = {
    "columns": "column shards",
    "rows": "row blocks",
    "host_rows": "row blocks on the ranks of one host",
    "replicas": "replicas",
}
"""What messages call the shards of `LAYOUTS`."""

REPLICA_GROUP = 0
"""Group size of replicas: their ranks reduce the gradients of all weights, but no vectors."""

SEQUENCE_LAYOUTS = {"cpu": frozenset({"rows"}), "cuda": frozenset({"rows", "replicas"})}
"""The `LAYOUTS` that a sequence table can have, by compute device. TorchRec has no row blocks on
one host for sequences, and trains a module's column shards only if all have the same width, so no
plan has either. On CPUs, FBGEMM's lookup of replicas always pools."""

MOST_SHARDS = 4
"""A rank cuts its columns of a table into at most this many times the fewest possible shards,
because each shard looks up all ids again."""


@dataclass(frozen=True, slots=True)
class ColumnShards:
    """Ranges of columns with all rows, on any ranks; a whole table is one such range.

    TorchRec fuses the lookups of one sharding type, so whole tables are declared column-wise too,
    and a rank looks all of them up with one kernel launch. Sequences are always whole, and declared
    table-wise.

    Args:
        is_sequence: whether the vectors of the table are not pooled.
    """

    group_size: int = 1
    is_sequence: bool = False

    def torchrec_type(self, topology: Topology) -> str:
        return "table_wise" if self.is_sequence else "column_wise"

    @staticmethod
    def shards(table: Table, widths: Iterable[tuple[int, int]]) -> list[Shard]:
        """Return the shards of a table side by side.

        Args:
            widths: ranks and numbers of columns, from the left; the last shard ends with the table,
                so it may be narrower.
        """
        shards, start = list[Shard](), 0
        for rank, width in widths:
            stop = min(start + width, table.embedding_dim)
            shards.append(dataclasses.replace(Shard.whole(table, rank), cols=(start, stop)))
            start = stop
        return shards

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
        return cls(is_sequence=not table.pooled)


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
        """Return the row blocks of a table for which `is_possible` is true."""
        blocks = row_blocks(table.num_embeddings, self.group_size)
        cols = (0, table.embedding_dim)
        return [
            Shard(table.name, rank, rows, cols, precision=table.precision)
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
        table = dataclasses.replace(table, precision=placed[0].precision)
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


@dataclass(frozen=True, slots=True)
class Replicas:
    """The whole table on every rank, which looks up its own samples (data parallelism).

    Neither ids nor vectors are exchanged. The ranks average the gradients of all weights, so that
    the replicas stay equal.
    """

    num_ranks: int
    group_size: int = REPLICA_GROUP

    @property
    def ranks(self) -> range:
        return range(self.num_ranks)

    def torchrec_type(self, topology: Topology) -> str:
        return "data_parallel"

    def shards(self, table: Table) -> list[Shard]:
        """Return the replicas of a table, in fp32 because their gradients are added up."""
        return [
            dataclasses.replace(Shard.whole(table, rank), replicated=True, precision="fp32")
            for rank in self.ranks
        ]

    @classmethod
    def from_shards(cls, shards: Sequence[Shard], table: Table, topology: Topology) -> Replicas:
        """Return the layout of shards if some of them are replicas.

        Raises:
            InvalidPlanError: there is not one whole table in fp32 on every rank.
        """
        layout = cls(topology.world_size)
        if sorted(shards) != layout.shards(table):
            raise InvalidPlanError(
                f"table {table.name!r} has replicas on the ranks "
                f"{sorted(shard.rank for shard in shards if shard.replicated)}; TorchRec "
                "replicates a table whole and in fp32, as its gradients are added up, once on each "
                f"of all {topology.world_size} ranks"
            )
        return layout


Layout = ColumnShards | RowBlocks | Replicas
"""A way to split one table into shards. Its `group_size` is the number of ranks that reduce partial
results among each other: 1 if none do, and `REPLICA_GROUP` for replicas."""


def num_equal_shards(num_cols: int, topology: Topology) -> int:
    """Return into how many equal shards a rank cuts its columns of a table to look them up.

    TorchRec trains several shards of a table on one rank only if they are equally wide. It is 1 if
    one lookup supports the columns, and 0 if no number of shards up to `MOST_SHARDS` times the
    fewest possible gives equal widths that are multiples of 4.
    """
    least = -(-num_cols // topology.max_shard_columns)
    if least == 1:
        return 1
    numbers = range(least, MOST_SHARDS * least + 1)
    return next((n for n in numbers if num_cols % (COLUMN_MULTIPLE * n) == 0), 0)


def layout_of(shards: Sequence[Shard], table: Table, topology: Topology) -> Layout:
    """Return the layout of the shards that tile a table, or replicate it.

    Raises:
        InvalidPlanError: they have no layout that TorchRec trains.
    """
    kind: type[Layout] = ColumnShards
    if is_replicated(shards):
        kind = Replicas
    elif is_row_wise(shards, table):
        kind = RowBlocks
    layout, name = kind.from_shards(shards, table, topology), layout_name(shards, table, topology)
    if name is not None and name not in _trained(table, topology):
        raise InvalidPlanError(
            f"{sequence_title(table)}, which TorchRec does not train in {LAYOUT_NAMES[name]} on a "
            f"{topology.compute_device}: {OTHER_LAYOUTS}"
        )
    return layout


def trained_layouts(table: Table, topology: Topology) -> frozenset[str]:
    """Return which of `table.layouts` a sharder may choose for it."""
    return table.layouts & _trained(table, topology)


def sequence_title(table: Table) -> str:
    """Return how messages name a table whose vectors are not pooled."""
    of_module = f" of module {table.module!r}" if table.module else ""
    return f"table {table.name!r}{of_module} is a sequence (pooled: false)"


def _trained(table: Table, topology: Topology) -> frozenset[str]:
    return LAYOUTS if table.pooled else SEQUENCE_LAYOUTS[topology.compute_device]


def is_replicated(shards: Sequence[Shard]) -> bool:
    """Return whether any of a table's shards is a replica; in a valid plan, then all are."""
    return any(shard.replicated for shard in shards)


def can_split_rows(table: Table, topology: Topology) -> bool:
    """Return whether row blocks of the table on all ranks can be trained.

    Every rank needs a row, and row blocks are as wide as the table.
    """
    fits_lookup = table.embedding_dim <= topology.max_shard_columns
    may_split = row_layout(topology.world_size, topology) in trained_layouts(table, topology)
    return fits_lookup and may_split and RowBlocks(range(topology.world_size)).is_possible(table)


def layout_name(shards: Sequence[Shard], table: Table, topology: Topology) -> str | None:
    """Return which of `LAYOUTS` the shards of a table are; None if the table is whole."""
    if is_replicated(shards):
        return "replicas"
    if is_row_wise(shards, table):
        return row_layout(len(shards), topology)
    return "columns" if len(shards) > 1 else None


def row_layout(group_size: int, topology: Topology) -> str:
    """Return which of `LAYOUTS` row blocks over `group_size` ranks are."""
    return "rows" if group_size == topology.world_size else "host_rows"


def is_row_wise(shards: Sequence[Shard], table: Table) -> bool:
    """Return whether a table's shards split its rows."""
    return any(shard.num_rows < table.num_embeddings for shard in shards)


def row_blocks(num_embeddings: int, num_blocks: int) -> list[Interval]:
    """Return the even blocks of rows that TorchRec trains, ceil(rows / blocks) in all but the last.

    There are fewer than `num_blocks` if no rows are left for the last ones.
    """
    height = -(-num_embeddings // num_blocks)
    return [
        (start, min(start + height, num_embeddings)) for start in range(0, num_embeddings, height)
    ]


def column_widths(table: Table, num_pieces: int) -> list[int]:
    """Return nearly even numbers of columns, all multiples of 4, the larger ones first."""
    steps, wider = divmod(table.embedding_dim // COLUMN_MULTIPLE, num_pieces)
    return [COLUMN_MULTIPLE * (steps + (piece < wider)) for piece in range(num_pieces)]
