"""A catalog of the pieces into which each table of a task can be cut, with their costs.

A plan picks pieces and ranks. The search and the lower bound both start from this catalog.

Letters: T tables, N column shapes, n pieces, V numbers of a shard (`compute.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats, Indices, Mask, TableArrays
from dlrm_sharded.plans.layouts import REPLICA_GROUP, num_equal_shards, row_layout, trained_layouts
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, MAX_COLUMNS
from dlrm_sharded.plans.task import REPLICA_GRADIENT_BYTES, ShardingTask, Topology

STEPS_IN_MEMORY = 32
"""A rank holds at least this many steps of a table's columns; larger steps would waste memory."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arrays over pieces of tables.

    Args:
        vectors: [n, V], work and MB read, see `ComputeModel.vectors`.
        size_bytes: [n], memory of weights and optimizer state.
        volume: [n], bytes that the piece's rank exchanges with every other rank for it.
    """

    vectors: Floats
    size_bytes: Indices
    volume: Floats

    def times(self, number: Indices) -> Pieces:
        """Return `number` [n] of each piece together."""
        return Pieces(
            self.vectors * number[:, None], self.size_bytes * number, self.volume * number
        )

    def take(self, places: Indices) -> Pieces:
        """Return the pieces at these places [m]."""
        return Pieces(self.vectors[places], self.size_bytes[places], self.volume[places])


@dataclass(frozen=True, slots=True)
class BlockShapes:
    """Every table cut into even blocks of rows, one on each rank of a group.

    Replicas are such blocks too: whole tables on all ranks. Their ranks reduce the gradients of the
    weights, whereas ranks with row blocks reduce pooled vectors.

    Args:
        group_size: number of ranks in the group.
        num_groups: number of groups of that size.
        possible: [T], whether every rank gets a row, the table may have the layout, and a lookup
            supports its width.
        block: [T], any of the blocks but the last.
        last: [T], the last block, which has as many rows as the others or fewer.
        reduce_volume: [T], bytes that each rank of the group sends to every other one of it; all
            bytes of the gradients of a replica.
        is_replica: whether the blocks are replicas.
    """

    group_size: int
    num_groups: int
    possible: Mask
    block: Pieces
    last: Pieces
    reduce_volume: Floats
    is_replica: bool = False

    @property
    def is_global(self) -> bool:
        """Return whether the group has all ranks, so a reduction leaves nothing to exchange."""
        return self.num_groups == 1


@dataclass(frozen=True, slots=True)
class Shapes:
    """All shapes of all tables of a task.

    Args:
        step: [T], columns of a step, in which widths are counted: 4, more for very wide tables.
        first: [T + 1], where each table's column shapes begin; they have 1, 2, ... steps.
        num_cols: [N], columns of each shape.
        columns: [N], column shards of every table and width.
        num_shards: [N], equal column shards into which a rank must cut the columns for its lookups;
            0 where it cannot. The costs are of all these shards.
        row_blocks: row blocks of all tables, for each of `Topology.group_sizes`.
        replicas: replicas of all tables; None where the optimizer trains none, and for one rank,
            where they are whole tables.
    """

    step: Indices
    first: Indices
    num_cols: Indices
    columns: Pieces
    num_shards: Indices
    row_blocks: tuple[BlockShapes, ...]
    replicas: BlockShapes | None

    @classmethod
    def from_task(
        cls,
        task: ShardingTask,
        compute: ComputeModel,
        *,
        max_widths: int = MAX_COLUMNS,
        sequences: Sequence[float] = (1.0, 1.0),
    ) -> Shapes:
        """Return all shapes of a task whose tables all have a reuse histogram (`with_profiles`).

        Args:
            max_widths: largest number of widths of a table; wider tables are cut in steps of 8, 12,
                ... columns. A table has more widths if its steps would be large for the memory.
            sequences: what bytes of sequences count as, see `ExchangeCosts`.
        """
        topology, pieces = task.topology, PieceCosts(task, compute, sequences)
        num_rows, dims = pieces.tables.num_rows, pieces.tables.num_cols
        step = COLUMN_MULTIPLE * -(-dims // (COLUMN_MULTIPLE * max_widths))
        most_bytes = max(topology.rank_memory_bytes) // STEPS_IN_MEMORY
        step_bytes = pieces.size_bytes(np.arange(len(dims)), num_rows, COLUMN_MULTIPLE)
        most = COLUMN_MULTIPLE * np.maximum(most_bytes // step_bytes, 1)
        step = np.array(list(map(_divisor, step.tolist(), most.tolist())), dtype=np.int64)
        # Powers of two divide the widest shard, so that the widths of tables that are wider than
        # it include it.
        is_too_wide = dims > topology.max_shard_columns
        step[is_too_wide] = 1 << np.ceil(np.log2(step[is_too_wide])).astype(np.int64)
        num_widths = -(-dims // step)
        # the widths of all tables lie in one array, one table after the other
        first = np.concatenate([[0], num_widths.cumsum()])
        table = np.repeat(np.arange(len(dims)), num_widths)
        num_steps = np.arange(first[-1]) - first[table] + 1
        num_cols = np.minimum(num_steps * step[table], dims[table])
        num_shards = np.ones_like(num_cols)
        for i in np.flatnonzero(is_too_wide).tolist():
            of_table = slice(first[i], first[i + 1])
            num_shards[of_table] = _num_shards(num_cols[of_table].tolist(), topology)
        parts = np.maximum(num_shards, 1)
        return cls(
            step=step,
            first=first,
            num_cols=num_cols,
            columns=pieces.columns(table, num_cols // parts).times(parts),
            num_shards=num_shards,
            row_blocks=tuple(pieces.row_blocks(size) for size in topology.group_sizes),
            replicas=pieces.replicas() if topology.world_size > 1 and task.can_replicate else None,
        )

    @property
    def whole(self) -> Indices:
        """[T], index of the column shape that is the whole table."""
        return self.first[1:] - 1

    @property
    def table(self) -> Indices:
        """[N], place in the task of the table that has the shape."""
        return np.repeat(np.arange(len(self.step)), np.diff(self.first))


def _divisor(step: int, most: int) -> int:
    """Return the largest divisor of a step that is a multiple of 4, and no larger than `most`."""
    return next(
        columns for columns in range(min(step, most), 0, -COLUMN_MULTIPLE) if step % columns == 0
    )


def _num_shards(num_cols: list[int], topology: Topology) -> list[int]:
    """Return the number of equal shards for each width of a table; 0 where there are none.

    A rank can give up some of its columns only if every smaller width can be cut, too.
    """
    num_shards = [num_equal_shards(width, topology) for width in num_cols]
    *narrower, whole = num_cols
    # the last step of a table may have fewer columns than the others, and lies on any rank
    if all(num_shards) and whole % num_cols[0] == 0:
        return num_shards
    only_one = [int(width <= topology.max_shard_columns) for width in narrower]
    return [*only_one, num_shards[-1] if topology.world_size == 1 else 0]


class PieceCosts:
    """Costs of pieces of a task's tables, which all have a reuse histogram."""

    def __init__(
        self, task: ShardingTask, compute: ComputeModel, sequences: Sequence[float] = (1.0, 1.0)
    ) -> None:
        self.tables = TableArrays(task.tables, task.topology, task.batch_size)
        self._task, self._compute, self._sequences = task, compute, sequences
        self._weight_bytes = np.array([TABLE_BYTES[table.precision] for table in task.tables])
        states = [task.topology.optimizer_bytes(table.name) for table in task.tables]
        self._state_bytes = np.array(states, dtype=np.int64)

    def columns(self, table: Indices, num_cols: Indices) -> Pieces:
        """Return column shards with their costs.

        Args:
            table: [n], places of the tables in the task.
            num_cols: [n], columns of the shards.
        """
        return self._pieces(table, self.tables.num_rows[table], num_cols)

    def row_blocks(self, group_size: int) -> BlockShapes:
        """Return the row blocks of every table on groups of `group_size` ranks."""
        topology, num_rows, dims = self._task.topology, self.tables.num_rows, self.tables.num_cols
        # `layouts.row_blocks` rounds heights up too, so the last blocks may be missing
        height = -(-num_rows // group_size)
        count = -(-num_rows // height)
        table = np.arange(len(num_rows))
        num_groups = topology.world_size // group_size
        num_bags = self._task.batch_size * self.tables.num_features
        num_bytes = dims * num_bags * (FLOAT_BYTES / topology.world_size)
        return BlockShapes(
            group_size=group_size,
            num_groups=num_groups,
            possible=(count == group_size) & self._may_be(row_layout(group_size, topology)),
            block=self._pieces(table, height, dims, group_size),
            last=self._pieces(table, num_rows - height * (count - 1), dims, group_size),
            # each rank reduces the samples of one rank of every group
            reduce_volume=num_bytes * ~self.tables.is_sequence * num_groups,
        )

    def replicas(self) -> BlockShapes:
        """Return replicas of every table, in fp32 whatever the precision of the table."""
        num_rows, dims = self.tables.num_rows, self.tables.num_cols
        replica = self._pieces(np.arange(len(num_rows)), num_rows, dims, REPLICA_GROUP)
        return BlockShapes(
            group_size=self._task.topology.world_size,
            num_groups=1,
            possible=self._may_be("replicas"),
            block=replica,
            last=replica,
            reduce_volume=(num_rows * dims).astype(np.float64) * FLOAT_BYTES,
            is_replica=True,
        )

    def _may_be(self, layout: str) -> Mask:
        """Return [T], whether a table may have one of the `LAYOUTS` that keep its full width."""
        tables, topology = self._task.tables, self._task.topology
        is_trained = np.array([layout in trained_layouts(table, topology) for table in tables])
        return is_trained & (self.tables.num_cols <= topology.max_shard_columns)

    def size_bytes(
        self, table: Indices, num_rows: Indices, num_cols: Indices | int, group_size: int = 1
    ) -> Indices:
        """Return [n], `Topology.shard_bytes` of pieces."""
        weight_bytes = self._weight_bytes[table]
        if group_size == REPLICA_GROUP:  # fp32 weights and their gradients
            weight_bytes = np.full_like(table, TABLE_BYTES["fp32"] + REPLICA_GRADIENT_BYTES)
        per_weight, per_row = self._state_bytes[table].T
        size_bytes: Indices = num_rows * (num_cols * (weight_bytes + per_weight) + per_row)
        return size_bytes

    def _pieces(
        self, table: Indices, num_rows: Indices, num_cols: Indices, group_size: int = 1
    ) -> Pieces:
        rank, group_sizes = np.zeros_like(table), np.full_like(table, group_size)
        workload = self.tables.workload(table, num_rows, num_cols, rank, group_sizes)
        # a group of all ranks has nothing left to exchange after its reduction
        reduce_size = workload.reduce_size
        is_exchanged = (reduce_size < workload.world_size) | (workload.world_size == 1)
        is_exchanged &= ~workload.is_replica
        parts = np.maximum(reduce_size, 1)
        return Pieces(
            vectors=self._compute.vectors(workload),
            size_bytes=self.size_bytes(table, num_rows, num_cols, group_size),
            volume=workload.vector_bytes(self._sequences) * is_exchanged / parts,
        )
