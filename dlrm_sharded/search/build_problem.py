"""Builds a `Problem` from a task with its costs and constraints.

Letters: U units, N shapes of all units, L loads, W ranks, T tables, n pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.exchange_costs import ExchangeCosts
from dlrm_sharded.cost.shapes import BlockShapes, Pieces, Shapes
from dlrm_sharded.cost.workload import Floats, Indices, Mask, owners
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, trained_layouts
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.loads import LoadWeights
from dlrm_sharded.search.piece_loads import PieceLoads
from dlrm_sharded.search.problem import Blocks, Demand, Number, Problem, RankGroup

MAX_WIDTHS = 64
"""Largest number of widths of a table; tables of more than 256 columns get wider steps than 4."""

SPLIT_ERROR = 0.05
"""Share that is added by default to the computation of a part of a table."""


def build_problem(
    costed: CostedTask,
    constraints: Constraints,
    *,
    critical_path_share: float,
    split_error: float = SPLIT_ERROR,
    max_widths: int = MAX_WIDTHS,
    all_replicas: bool = False,
) -> Problem:
    """Return the search problem of a task.

    Args:
        critical_path_share: weight of the critical path in the objective; the rest is the cost.
        split_error: share that is added to the computation of a part of a table, so that no split
            is made for a gain that is within the model's error.
        max_widths: largest number of widths of a table, see `Shapes.from_task`.
        all_replicas: whether to offer even replicas that seem not to pay: for an earlier plan,
            which may have some, and for few tables.
    """
    task, compute, hosts = costed.task, costed.compute, costed.hosts
    costs = ExchangeCosts.from_model(costed.communication, hosts)
    shapes = Shapes.from_task(task, compute, max_widths=max_widths, sequences=costs.sequences)
    units = _Units.from_task(task, constraints)
    kept = _kept_shapes(shapes, units)
    columns = kept.pieces(shapes.columns)
    piece_loads = PieceLoads(
        compute=compute,
        exchange_costs=costs,
        weights=LoadWeights(critical_path_share, costs),
        split_error=split_error,
        mean_read_mb=float(shapes.columns.vectors[shapes.whole, READ_MB].sum()) / hosts.world_size,
    )
    load, margin = piece_loads.load(columns, np.where(kept.is_split[:, None], split_error, 0.0))
    capacity_bytes = constraints.capacity(task.topology)
    replicable = _replicable(shapes, units, task, constraints, capacity_bytes)
    if constraints.replicate == "auto" and not all_replicas:
        replicable &= _may_pay(shapes, piece_loads, units, replicable, load, kept.first_shape)
    groups, blocks = _groups_and_blocks(shapes, piece_loads, units, replicable)
    return Problem(
        costed=costed,
        exchange_costs=costs,
        weights=piece_loads.weights,
        tables=units.tables,
        owners=units.owners(task),
        # 0 marks units that may not be split; their only shape is one step.
        columns_per_step=np.where(units.is_splittable, shapes.step[units.first_table], 0),
        first_shape=kept.first_shape,
        possible=kept.possible,
        demand=Demand.pack(columns.vectors, columns.volume, kept.num_shards, margin),
        load=load,
        margin=margin,
        shared_ms=costs.any_byte_ms * columns.volume + costs.shard_ms * kept.num_shards,
        size_bytes=columns.size_bytes,
        capacity_bytes=capacity_bytes,
        allowed=units.allowed,
        separated=units.separated,
        blocks=blocks,
        groups=groups,
        replica_gain_ms=piece_loads.replica_gain_ms(shapes)[units.first_table],
        must_replicate=units.must_replicate,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """The units of a task, and what constraints say about them; names become indices here.

    Args:
        tables: places in the task of each unit's tables.
        first_table: [U], the first of them; the only one for units that may be split.
        is_splittable: [U], whether the unit may be cut into column pieces.
        is_movable: [U], whether constraints let the unit lie in row blocks or replicas.
        is_sequence: [U], whether the vectors of the unit are not pooled.
        has_rows: [U], whether constraints let the unit lie in row blocks.
        allowed, separated, must_replicate: see `Problem`.
    """

    tables: tuple[tuple[int, ...], ...]
    first_table: Indices
    is_splittable: Mask
    is_movable: Mask
    is_sequence: Mask
    has_rows: Mask
    allowed: Mask | None
    separated: Mask
    must_replicate: Mask

    @classmethod
    def from_task(cls, task: ShardingTask, constraints: Constraints) -> _Units:
        """Make a unit of each set of tables that stay together, and of every other table."""
        world_size = task.topology.world_size
        table_index = {table.name: i for i, table in enumerate(task.tables)}
        bundles = [
            tuple(sorted(table_index[name] for name in names))
            for names in constraints.together
            if names
        ]
        bundled = {table for bundle in bundles for table in bundle}
        single = [(table,) for table in range(len(task.tables)) if table not in bundled]
        tables = sorted([*single, *bundles])
        unsplit = bundled | {table_index[name] for name in constraints.unsplit}
        is_movable = np.array([bundle[0] not in unsplit for bundle in tables])
        first = [task.tables[bundle[0]] for bundle in tables]
        has_columns = ["columns" in trained_layouts(table, task.topology) for table in first]
        names = [[task.tables[i].name for i in bundle] for bundle in tables]
        separated = constraints.separated(names)
        # a replica on one rank is a whole table
        must_replicate = constraints.must_replicate(names) & (world_size > 1)
        is_free = ~separated.any(axis=1) & ~must_replicate
        return cls(
            tables=tuple(tables),
            first_table=np.array([bundle[0] for bundle in tables]),
            is_splittable=is_movable & has_columns & constraints.can_split,
            is_movable=is_movable,
            is_sequence=np.array([not table.pooled for table in first], dtype=bool),
            has_rows=is_movable & is_free & constraints.can_split_rows,
            allowed=constraints.allowed(names, world_size),
            separated=separated,
            must_replicate=must_replicate,
        )

    def allowed_on_a_group(self, group_size: int) -> Mask | np.bool_:
        """Return [U], whether the unit may be on all ranks of some group of this size."""
        if self.allowed is None:
            return np.True_
        groups = self.allowed.reshape(len(self.tables), -1, group_size)
        return np.logical_or.reduce(np.logical_and.reduce(groups, axis=2), axis=1)

    def owners(self, task: ShardingTask) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the modules of each unit's tables."""
        number = owners(task.tables).tolist()
        return tuple(tuple(sorted({number[i] for i in unit})) for unit in self.tables)


@dataclass(frozen=True, slots=True)
class _KeptShapes:
    """The column shapes of tables that become shapes of units.

    Args:
        first_shape: [U + 1], as in `Problem`.
        table_shape: [n], shapes of tables that are kept.
        unit_shape: [n], the shape of a unit that each becomes part of.
        num_shards: [N], shards of a unit's shape.
        possible: [N], whether lookups support every one of them.
    """

    first_shape: Indices
    table_shape: Indices
    unit_shape: Indices
    num_shards: Floats
    possible: Mask

    @property
    def is_split(self) -> Mask:
        """[N], whether the shape is a part of its unit: all but the last one of each are."""
        is_split = np.ones(len(self.num_shards), dtype=bool)
        is_split[self.first_shape[1:] - 1] = False
        return is_split

    def pieces(self, pieces: Pieces) -> Pieces:
        """Return what the units' shapes add to a rank: the sum over their tables."""
        return Pieces(
            vectors=self.sum(pieces.vectors),
            size_bytes=self.sum(pieces.size_bytes),
            volume=self.sum(pieces.volume),
        )

    def sum(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return [N, ...], values of the tables' shapes, summed over the tables of each unit."""
        sums = np.zeros((self.first_shape[-1], *values.shape[1:]), dtype=values.dtype)
        # Several tables add to one shape of their unit: `sums[index] += ...` would keep the last.
        np.add.at(sums, self.unit_shape, values[self.table_shape])
        return sums


def _kept_shapes(shapes: Shapes, units: _Units) -> _KeptShapes:
    """Keep all shapes of tables that may be split, and only the whole of the others."""
    table_shape: list[int] = []
    unit_shape: list[int] = []
    num_shards: list[float] = []
    possible: list[bool] = []
    first_shape = [0]
    for tables, is_splittable in zip(units.tables, units.is_splittable, strict=True):
        begin = len(num_shards)
        if is_splittable:
            table = tables[0]
            # Unit and table have the same widths, so shapes correspond one to one.
            all_shapes = range(shapes.first[table], shapes.first[table + 1])
            table_shape += list(all_shapes)
            unit_shape += list(range(begin, begin + len(all_shapes)))
            num_shards += shapes.num_shards[all_shapes].tolist()
            possible += (shapes.num_shards[all_shapes] > 0).tolist()
        else:
            # One shape, to which every table of the unit adds its whole.
            table_shape += [int(shapes.whole[table]) for table in tables]
            unit_shape += [begin] * len(tables)
            num_shards.append(float(len(tables)))
            possible.append(bool((shapes.num_shards[shapes.whole[list(tables)]] == 1).all()))
        first_shape.append(len(num_shards))
    return _KeptShapes(
        first_shape=np.array(first_shape),
        table_shape=np.array(table_shape),
        unit_shape=np.array(unit_shape),
        num_shards=np.array(num_shards),
        possible=np.array(possible),
    )


def _groups_and_blocks(
    shapes: Shapes, piece_loads: PieceLoads, units: _Units, replicable: Mask
) -> tuple[tuple[RankGroup, ...], tuple[Blocks, ...]]:
    """Return all groups of ranks, and the blocks of each kind.

    Row blocks of sequences are a separate kind; replicas come last.

    Args:
        replicable: [U], units of which replicas are offered.
    """
    groups: list[RankGroup] = []
    blocks: list[Blocks] = []

    def add(
        cut: BlockShapes,
        is_allowed: Mask,
        layouts: Sequence[RowBlocks | Replicas],
        of_sequences: bool = False,
    ) -> None:
        new_groups = range(len(groups), len(groups) + len(layouts))
        groups.extend(RankGroup(layout, len(blocks)) for layout in layouts)
        blocks.append(
            piece_loads.blocks(
                cut, units.first_table, is_allowed, new_groups, of_sequences=of_sequences
            )
        )

    for cut in shapes.row_blocks:
        size = cut.group_size
        # Row blocks lie on all ranks of a group, so constraints must allow all of these.
        is_allowed = units.has_rows & units.allowed_on_a_group(size)
        starts = range(0, piece_loads.exchange_costs.num_ranks, size)
        layouts = [RowBlocks(range(first, first + size)) for first in starts]
        add(cut, is_allowed & ~units.is_sequence, layouts)
        if cut.is_global and units.is_sequence.any():
            add(cut, is_allowed & units.is_sequence, layouts, of_sequences=True)
    if shapes.replicas is not None and replicable.any():
        add(shapes.replicas, replicable, [Replicas(piece_loads.exchange_costs.num_ranks)])
    return tuple(groups), tuple(blocks)


def _replicable(
    shapes: Shapes,
    units: _Units,
    task: ShardingTask,
    constraints: Constraints,
    capacity_bytes: Indices,
) -> Mask:
    """Return [U], units that may be replicated; only those that must be, if constraints name any.

    Raises:
        InfeasibleTaskError: a unit that must be replicated cannot be.
    """
    replicable = np.zeros(len(units.tables), dtype=bool)
    if shapes.replicas is not None:
        size_bytes = shapes.replicas.block.size_bytes[units.first_table]
        replicable = (
            shapes.replicas.possible[units.first_table]
            & (size_bytes <= capacity_bytes.min())
            & units.is_movable  # a unit of several tables stays together, and on one rank
            & ~units.separated.any(axis=1)
            & units.allowed_on_a_group(len(capacity_bytes))
        )
    _check_replicable(units.must_replicate & ~replicable, units, task, capacity_bytes)
    return replicable if constraints.replicate == "auto" else units.must_replicate


def _may_pay(
    shapes: Shapes,
    piece_loads: PieceLoads,
    units: _Units,
    replicable: Mask,
    load: Floats,
    first_shape: Indices,
) -> Mask:
    """Return [U], units whose replicas may pay off.

    These are the units with a gain, if together they gain more than the first replica costs, and
    units whose narrowest piece takes a rank longer than all units take a rank on average.
    """
    gain_ms = piece_loads.replica_gain_ms(shapes, has_margin=False)[units.first_table]
    pays = replicable & (gain_ms > 0)
    pays &= float(gain_ms[pays].sum()) > piece_loads.first_replica_ms
    narrow_ms, whole_ms = (
        load[shape].sum(axis=1) for shape in (first_shape[:-1], first_shape[1:] - 1)
    )
    return pays | (narrow_ms > whole_ms.sum() / piece_loads.exchange_costs.num_ranks)


def _check_replicable(
    impossible: Mask, units: _Units, task: ShardingTask, capacity_bytes: Indices
) -> None:
    """Raise InfeasibleTaskError if a unit that must be replicated cannot be, [U]."""
    for unit in np.flatnonzero(impossible).tolist():
        table = task.tables[units.first_table[unit]]
        size_bytes = task.topology.shard_bytes(
            table.name, table.num_embeddings, table.embedding_dim, replicated=True
        )
        raise InfeasibleTaskError(
            f"sharder.replicate names table {table.name!r}, which takes {size_bytes:,} B on every "
            f"rank, its gradients included, and has {table.embedding_dim:,} columns; the ranks "
            f"have {capacity_bytes.min():,} B or more, and lookups on "
            f"{task.topology.compute_device} at most {task.topology.max_shard_columns:,} columns"
        )
