"""Builds a `Problem` from a task, a cost model and constraints.

Letters: U units, N shapes of all units, L loads, W ranks, T tables, n pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import AdditiveCostModel, for_task
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.features import Floats
from dlrm_sharded.cost.shapes import BlockShapes, Indices, Pieces, Shapes
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.problem import (
    NUM_LOADS,
    Blocks,
    Demand,
    LoadWeights,
    Mask,
    Number,
    Problem,
    RankGroup,
)
from dlrm_sharded.task import ShardingTask

MAX_WIDTHS = 64
"""Largest number of widths of a table; tables of more than 256 columns get wider steps than 4."""


def build_problem(
    task: ShardingTask,
    model: AdditiveCostModel,
    constraints: Constraints,
    *,
    critical_path_share: float,
    split_error: float,
    max_widths: int = MAX_WIDTHS,
) -> Problem:
    """Return the search problem of a task whose tables all have a reuse histogram.

    Args:
        critical_path_share: weight of the critical path in the objective; the rest is the cost.
        split_error: share of its computation by which a piece of a table is priced higher, so that
            no split is made for a gain that is within the model's error.
        max_widths: largest number of widths of a table, see `Shapes.from_task`.
    """
    model = for_task(model, task)
    shapes = Shapes.from_task(task, model.compute, max_widths=max_widths)
    hosts = model.hosts(task.topology)
    prices = ExchangePrices.from_model(model.communication, hosts)
    units = _Units.from_task(task, constraints)
    kept_shapes = _kept_shapes(shapes, units)
    columns = kept_shapes.pieces(shapes.columns)
    pricing = _Pricing(
        model=model,
        prices=prices,
        weights=LoadWeights(critical_path_share, prices),
        split_error=split_error,
        mean_read_mb=float(shapes.columns.vectors[shapes.whole, READ_MB].sum()) / hosts.world_size,
    )
    # Only partial tables have a margin: there is nothing to decide about whole ones.
    is_partial = np.ones(len(columns.volume), dtype=bool)
    is_partial[kept_shapes.first_shape[1:] - 1] = False
    load, margin = pricing.load(columns, is_partial * split_error)
    # Constraints name tables; from here on, units and ranks have numbers.
    table_index = {table.name: i for i, table in enumerate(task.tables)}
    allowed = constraints.allowed(units.tables, table_index, hosts.world_size)
    separated = constraints.separated(units.tables, table_index)
    groups, blocks = _groups_and_blocks(shapes, pricing, units, allowed, separated)
    return Problem(
        task=task,
        model=model,
        hosts=hosts,
        prices=prices,
        weights=pricing.weights,
        tables=units.tables,
        # 0 marks units that may not be split; their only shape is one step.
        columns_per_step=np.where(units.is_splittable, shapes.step[units.first_table], 0),
        first_shape=kept_shapes.first_shape,
        possible=kept_shapes.possible(shapes),
        demand=Demand.pack(columns.vectors, columns.volume, kept_shapes.num_shards, margin),
        load=load,
        margin=margin,
        shared_ms=prices.any_byte_ms * columns.volume + prices.shard_ms * kept_shapes.num_shards,
        size_bytes=columns.size_bytes,
        host_load=prices.busiest_host_byte_ms * columns.volume,
        capacity_bytes=constraints.capacity(task.topology),
        allowed=allowed,
        separated=separated,
        blocks=blocks,
        groups=groups,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """The units of a task.

    Args:
        tables: places in the task of each unit's tables.
        first_table: [U], the first of them; the only one for units that may be split.
        is_splittable: [U], whether the unit may be cut into pieces.
    """

    tables: tuple[tuple[int, ...], ...]
    first_table: Indices
    is_splittable: Mask

    @classmethod
    def from_task(cls, task: ShardingTask, constraints: Constraints) -> _Units:
        """Make a unit of each set of tables that stay together, and of every other table."""
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
        return cls(
            tables=tuple(tables),
            first_table=np.array([bundle[0] for bundle in tables]),
            is_splittable=np.array([bundle[0] not in unsplit for bundle in tables]),
        )


@dataclass(frozen=True, slots=True)
class _KeptShapes:
    """The column shapes of tables that become shapes of units.

    Args:
        first_shape: [U + 1], as in `Problem`.
        table_shape: [n], shapes of tables that are kept.
        unit_shape: [n], the shape of a unit that each becomes part of.
        num_shards: [N], tables in a unit's shape, each of which is a shard.
    """

    first_shape: Indices
    table_shape: Indices
    unit_shape: Indices
    num_shards: Floats

    def pieces(self, pieces: Pieces) -> Pieces:
        """Return what the units' shapes add to a rank: the sum over their tables."""
        return Pieces(
            vectors=self._sum(pieces.vectors),
            size_bytes=self._sum(pieces.size_bytes),
            volume=self._sum(pieces.volume),
        )

    def possible(self, shapes: Shapes) -> Mask:
        """Return [N], whether lookups support every shard of a unit's shape."""
        possible = np.ones(self.first_shape[-1], dtype=bool)
        np.logical_and.at(possible, self.unit_shape, shapes.possible[self.table_shape])
        return possible

    def _sum(self, values: NDArray[Number]) -> NDArray[Number]:
        sums = np.zeros((self.first_shape[-1], *values.shape[1:]), dtype=values.dtype)
        # Several tables add to one shape of their unit: `sums[index] += ...` would keep the last.
        np.add.at(sums, self.unit_shape, values[self.table_shape])
        return sums


def _kept_shapes(shapes: Shapes, units: _Units) -> _KeptShapes:
    """Keep all shapes of tables that may be split, and the whole of the others."""
    table_shape: list[int] = []
    unit_shape: list[int] = []
    num_shards: list[float] = []
    first_shape = [0]
    for tables, is_splittable in zip(units.tables, units.is_splittable, strict=True):
        begin = len(num_shards)
        if is_splittable:
            table = tables[0]
            # Unit and table have the same widths, so shapes correspond one to one.
            all_shapes = range(shapes.first[table], shapes.first[table + 1])
            table_shape += list(all_shapes)
            unit_shape += list(range(begin, begin + len(all_shapes)))
            num_shards += [1.0] * len(all_shapes)
        else:
            # One shape, to which every table of the unit adds its whole.
            table_shape += [int(shapes.whole[table]) for table in tables]
            unit_shape += [begin] * len(tables)
            num_shards.append(float(len(tables)))
        first_shape.append(len(num_shards))
    return _KeptShapes(
        first_shape=np.array(first_shape),
        table_shape=np.array(table_shape),
        unit_shape=np.array(unit_shape),
        num_shards=np.array(num_shards),
    )


def _groups_and_blocks(
    shapes: Shapes, pricing: _Pricing, units: _Units, allowed: Mask | None, separated: Mask
) -> tuple[tuple[RankGroup, ...], tuple[Blocks, ...]]:
    """Return all groups of ranks, and the row blocks of each kind.

    Only this function depends on which kinds exist.
    """
    groups: list[RankGroup] = []
    blocks: list[Blocks] = []
    for kind, cut in enumerate(shapes.row_blocks):
        size = cut.group_size
        ranks = range(0, pricing.prices.num_ranks, size)
        new_groups = range(len(groups), len(groups) + len(ranks))
        groups += [RankGroup(range(first, first + size), kind) for first in ranks]
        # Row blocks lie on all ranks of a group, so constraints must allow all of these. Units that
        # must be kept apart stay in columns.
        is_allowed = (
            units.is_splittable & ~separated.any(axis=1) & _is_allowed_on_some_group(allowed, size)
        )
        blocks.append(pricing.blocks(cut, units.first_table, is_allowed, new_groups))
    return tuple(groups), tuple(blocks)


def _is_allowed_on_some_group(allowed: Mask | None, group_size: int) -> Mask | np.bool_:
    """Return [U], whether the unit may be on all ranks of some group of this size."""
    if allowed is None:
        return np.True_
    groups = allowed.reshape(len(allowed), -1, group_size)
    is_allowed: Mask = np.logical_or.reduce(np.logical_and.reduce(groups, axis=2), axis=1)
    return is_allowed


@dataclass(frozen=True, slots=True)
class _Pricing:
    """Prices pieces.

    Args:
        mean_read_mb: MB that a rank reads in a step on average.
    """

    model: AdditiveCostModel
    prices: ExchangePrices
    weights: LoadWeights
    split_error: float
    mean_read_mb: float

    def load(self, pieces: Pieces, error: Floats) -> tuple[Floats, Floats]:
        """Return the loads [n, L] of pieces, and how much of them is margin.

        Args:
            error: [n], share of the computation by which a piece is priced higher.
        """
        # Prices rise with what the whole rank reads: at least the piece, about as much as others.
        crowd = pieces.vectors.copy()
        crowd[:, READ_MB] = np.maximum(crowd[:, READ_MB], self.mean_read_mb)
        compute_ms = self.model.compute.work_ms(pieces.vectors, crowd)
        margin = self.weights.loads(compute_ms * error[:, None], 0.0 * pieces.volume)
        return self.weights.loads(compute_ms, pieces.volume) + margin, margin

    def blocks(self, cut: BlockShapes, table: Indices, is_allowed: Mask, groups: range) -> Blocks:
        """Return one kind of row blocks of all units.

        Args:
            table: [U], the table of each unit that may be split.
            is_allowed: [U], whether constraints allow the unit to have such blocks.
        """
        reduce = self.prices.reduces[cut.group_size]
        reduce_ms = reduce.byte_ms * cut.reduce_volume[table] + reduce.shard_ms
        piece = Pieces(
            cut.block.vectors[table], cut.block.size_bytes[table], cut.block.volume[table]
        )
        load, margin = self.load(piece, np.full(len(table), self.split_error))
        surcharge = margin.copy()  # `load` and `surcharge` are both added to below
        size_bytes = np.repeat(piece.size_bytes[:, None], cut.group_size, axis=1)
        size_bytes[:, -1] = cut.last.size_bytes[table]
        if cut.is_global:  # see `Blocks.is_global`
            shared_ms, num_shards = reduce_ms, 0.0
            fixed_load = np.zeros(NUM_LOADS)
        else:
            shared_ms = (
                self.prices.any_byte_ms * piece.volume + self.prices.shard_ms
            ) * cut.group_size
            num_shards = 1.0
            reduce_load = reduce_ms[:, None] * self.weights.exchange
            load += reduce_load
            surcharge += reduce_load
            fixed_load = reduce.fixed_ms * self.weights.exchange
        return Blocks(
            group_size=cut.group_size,
            groups=groups,
            possible=cut.possible[table] & is_allowed,
            demand=Demand.pack(
                piece.vectors, piece.volume, np.full(len(table), num_shards), surcharge
            ),
            load=load,
            margin=margin,
            size_bytes=size_bytes,
            shared_ms=shared_ms,
            fixed_ms=reduce.fixed_ms,
            fixed_load=fixed_load,
        )
