"""Builds a `Problem` from a task with its prices and constraints.

Letters: U units, N shapes of all units, L loads, W ranks, T tables, n pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.shapes import Indices, Pieces, Shapes
from dlrm_sharded.cost.workload import Floats, owners
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, trained_layouts
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.pricing import Pricing
from dlrm_sharded.search.problem import (
    Blocks,
    Demand,
    LoadWeights,
    Mask,
    Number,
    Problem,
    RankGroup,
)
from dlrm_sharded.search.replication import which_pay
from dlrm_sharded.search.split_errors import SplitErrors

MAX_WIDTHS = 64
"""Largest number of widths of a table; tables of more than 256 columns get wider steps than 4."""


def build_problem(
    priced: PricedTask,
    constraints: Constraints,
    *,
    critical_path_share: float,
    split_error: float | None,
    max_widths: int = MAX_WIDTHS,
    all_replicas: bool = False,
) -> Problem:
    """Return the search problem of a task.

    Args:
        critical_path_share: weight of the critical path in the objective; the rest is the cost.
        split_error: share of its computation by which a piece of a table is priced higher, so that
            no split is made for a gain that is within the model's error; None for what the prices
            say of that, see `split_errors`.
        max_widths: largest number of widths of a table, see `Shapes.from_task`.
        all_replicas: whether to offer replicas also of tables for which they do not seem to pay,
            as an earlier plan may have them.
    """
    task, hosts = priced.task, priced.hosts
    prices = ExchangePrices.from_model(priced.communication, hosts)
    shapes = Shapes.from_task(
        task, priced.compute, max_widths=max_widths, sequences=prices.sequences
    )
    units = _Units.from_task(task, constraints)
    kept_shapes = _kept_shapes(shapes, units)
    columns = kept_shapes.pieces(shapes.columns)
    errors = (
        SplitErrors.of_prices(priced, shapes)
        if split_error is None
        else SplitErrors.stated(split_error, shapes)
    )
    pricing = Pricing(
        compute=priced.compute,
        prices=prices,
        weights=LoadWeights(critical_path_share, prices),
        errors=errors,
        mean_read_mb=float(shapes.columns.vectors[shapes.whole, READ_MB].sum()) / hosts.world_size,
    )
    load, margin = pricing.load(columns, kept_shapes.sum(errors.columns))
    # Constraints name tables; from here on, units and ranks have numbers.
    names = [[task.tables[i].name for i in of_unit] for of_unit in units.tables]
    allowed = constraints.allowed(names, hosts.world_size)
    separated = constraints.separated(names)
    capacity_bytes = constraints.capacity(task.topology)
    must_replicate = constraints.must_replicate(names)
    if hosts.world_size == 1:
        must_replicate[:] = False  # a replica on one rank is a whole table
    without_rows = separated.any(axis=1) | must_replicate | (not constraints.can_split_rows)
    is_sequence = np.array([not task.tables[i].pooled for i in units.first_table], dtype=bool)
    groups, blocks = _groups_and_blocks(shapes, pricing, units, allowed, without_rows, is_sequence)
    replicable = _replicable(shapes, units, allowed, separated, capacity_bytes)
    _check_replicable(must_replicate & ~replicable, units, task, capacity_bytes)
    replica_gain_ms = pricing.replica_gain_ms(shapes)[units.first_table]
    if constraints.replicate != "auto":
        replicable &= must_replicate
    elif not all_replicas:
        plain_gain_ms = pricing.replica_gain_ms(shapes, has_margin=False)[units.first_table]
        pays = which_pay(plain_gain_ms, replicable, pricing.first_replica_ms)
        # What takes one rank longer than all tables take in the mean decides what a plan costs,
        # where narrow pieces do not help.
        narrow_ms, whole_ms = (
            load[shape].sum(axis=1)
            for shape in (kept_shapes.first_shape[:-1], kept_shapes.first_shape[1:] - 1)
        )
        replicable = pays | (replicable & (narrow_ms > whole_ms.sum() / hosts.world_size))
    if shapes.replicas is not None and replicable.any():
        kind = range(len(groups), len(groups) + 1)
        groups += (RankGroup(Replicas(hosts.world_size), len(blocks)),)
        blocks += (
            pricing.blocks(shapes.replicas, errors.replicas, units.first_table, replicable, kind),
        )
    return Problem(
        priced=priced,
        prices=prices,
        weights=pricing.weights,
        tables=units.tables,
        owners=units.owners(task),
        # 0 marks units that may not be split; their only shape is one step.
        columns_per_step=np.where(units.is_splittable, shapes.step[units.first_table], 0),
        first_shape=kept_shapes.first_shape,
        possible=kept_shapes.possible(shapes, units.is_splittable),
        demand=Demand.pack(columns.vectors, columns.volume, kept_shapes.num_shards, margin),
        load=load,
        margin=margin,
        shared_ms=prices.any_byte_ms * columns.volume + prices.shard_ms * kept_shapes.num_shards,
        size_bytes=columns.size_bytes,
        host_load=prices.busiest_host_byte_ms * columns.volume,
        capacity_bytes=capacity_bytes,
        allowed=allowed,
        separated=separated,
        blocks=blocks,
        groups=groups,
        replica_gain_ms=replica_gain_ms,
        must_replicate=must_replicate,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """The units of a task.

    Args:
        tables: places in the task of each unit's tables.
        first_table: [U], the first of them; the only one for units that may be split.
        is_splittable: [U], whether the unit may be cut into column pieces.
        is_movable: [U], whether constraints let the unit lie in row blocks or replicas.
    """

    tables: tuple[tuple[int, ...], ...]
    first_table: Indices
    is_splittable: Mask
    is_movable: Mask

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
        is_movable = np.array([bundle[0] not in unsplit for bundle in tables])
        has_columns = [
            "columns" in trained_layouts(task.tables[bundle[0]], task.topology) for bundle in tables
        ]
        return cls(
            tables=tuple(tables),
            first_table=np.array([bundle[0] for bundle in tables]),
            is_splittable=is_movable & has_columns & constraints.can_split,
            is_movable=is_movable,
        )

    def owners(self, task: ShardingTask) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the modules of each unit's tables."""
        number = owners(task.tables).tolist()
        return tuple(tuple(sorted({number[i] for i in of_unit})) for of_unit in self.tables)


@dataclass(frozen=True, slots=True)
class _KeptShapes:
    """The column shapes of tables that become shapes of units.

    Args:
        first_shape: [U + 1], as in `Problem`.
        table_shape: [n], shapes of tables that are kept.
        unit_shape: [n], the shape of a unit that each becomes part of.
        num_shards: [N], shards of a unit's shape.
    """

    first_shape: Indices
    table_shape: Indices
    unit_shape: Indices
    num_shards: Floats

    def pieces(self, pieces: Pieces) -> Pieces:
        """Return what the units' shapes add to a rank: the sum over their tables."""
        return Pieces(
            vectors=self.sum(pieces.vectors),
            size_bytes=self.sum(pieces.size_bytes),
            volume=self.sum(pieces.volume),
        )

    def possible(self, shapes: Shapes, is_splittable: Mask) -> Mask:
        """Return [N], whether lookups support every shard of a unit's shape.

        Args:
            is_splittable: [U], whether a unit may be more than one shard.
        """
        possible = np.ones(self.first_shape[-1], dtype=bool)
        may_split = np.repeat(is_splittable, np.diff(self.first_shape))[self.unit_shape]
        num_shards = shapes.num_shards[self.table_shape]
        np.logical_and.at(
            possible, self.unit_shape, (num_shards == 1) | (may_split & (num_shards > 1))
        )
        return possible

    def sum(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return [n, ...], sums over the tables of a unit of what their shapes have."""
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
            num_shards += shapes.num_shards[all_shapes].tolist()
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
    shapes: Shapes,
    pricing: Pricing,
    units: _Units,
    allowed: Mask | None,
    without: Mask,
    is_sequence: Mask,
) -> tuple[tuple[RankGroup, ...], tuple[Blocks, ...]]:
    """Return all groups of ranks, and the row blocks of each kind.

    Args:
        without: [U], units that have no row blocks, as they are kept apart or replicated.
        is_sequence: [U], units whose row blocks are a kind beside those of the others.
    """
    groups: list[RankGroup] = []
    blocks: list[Blocks] = []
    cuts = [
        (cut, error, of_sequences)
        for cut, error in zip(shapes.row_blocks, pricing.errors.row_blocks, strict=True)
        for of_sequences in (False, True)
        if not of_sequences or (cut.is_global and is_sequence.any())
    ]
    for kind, (cut, error, of_sequences) in enumerate(cuts):
        size = cut.group_size
        ranks = range(0, pricing.prices.num_ranks, size)
        new_groups = range(len(groups), len(groups) + len(ranks))
        groups += [RankGroup(RowBlocks(range(first, first + size)), kind) for first in ranks]
        # Row blocks lie on all ranks of a group, so constraints must allow all of these.
        is_allowed = units.is_movable & ~without & _is_allowed_on_some_group(allowed, size)
        is_allowed &= is_sequence == of_sequences
        of_kind = pricing.blocks(
            cut, error, units.first_table, is_allowed, new_groups, of_sequences=of_sequences
        )
        blocks.append(of_kind)
    return tuple(groups), tuple(blocks)


def _is_allowed_on_some_group(allowed: Mask | None, group_size: int) -> Mask | np.bool_:
    """Return [U], whether the unit may be on all ranks of some group of this size."""
    if allowed is None:
        return np.True_
    groups = allowed.reshape(len(allowed), -1, group_size)
    return np.logical_or.reduce(np.logical_and.reduce(groups, axis=2), axis=1)


def _replicable(
    shapes: Shapes, units: _Units, allowed: Mask | None, separated: Mask, capacity_bytes: Indices
) -> Mask:
    """Return [U], units that may be on every rank, as far as memory and constraints are known."""
    if shapes.replicas is None:
        return np.zeros(len(units.tables), dtype=bool)
    size_bytes = shapes.replicas.block.size_bytes[units.first_table]
    return (
        shapes.replicas.possible[units.first_table]
        & (size_bytes <= capacity_bytes.min())
        & units.is_movable  # a unit of several tables stays together, and on one rank
        & ~separated.any(axis=1)
        & _is_allowed_on_some_group(allowed, len(capacity_bytes))
    )


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
