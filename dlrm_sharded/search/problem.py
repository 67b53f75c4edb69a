"""What a search decides over, as arrays: units, the shapes they can take, what each adds to a rank.

A unit is what is placed as one: a table, or tables that are kept together. Its column shapes are
counted in steps (4 columns, as a rule); tables that may not be split have one step, the whole.

Letters: U units, N shapes of all units, L loads, W ranks,
V numbers of a shard (`cost/compute.py`), A = V + 2 + L.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import AdditiveCostModel
from dlrm_sharded.cost.communication import Hosts
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.features import Floats
from dlrm_sharded.cost.shapes import BlockShapes, Indices, Pieces, Shapes
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.task import ShardingTask

Mask = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)

MAX_WIDTHS = 64
"""Of a table: tables of more than 256 columns are cut at multiples of 8, 12, ... columns."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Units cut into row blocks, one on each rank of a group.

    Args:
        possible: [U].
        asks: [U, A], what one block adds to its rank, see `Problem.asks`.
        load: [U, L], likewise.
        margin: [U, L], as for column shapes.
        size_bytes: [U, B], of the blocks of a group, the last one of which may be smaller.
        shared_ms: [U], what every rank pays for it.
        fixed_ms: paid by every rank of a group that has any.
    """

    possible: Mask
    asks: Floats
    load: Floats
    margin: Floats
    size_bytes: Indices
    shared_ms: Floats
    fixed_ms: float


@dataclass(frozen=True, slots=True)
class Weights:
    """How the loads of a rank follow from its stages, L = 4.

    `cost` is the largest sum of computation and exchanges, the first load, and what the exchanges
    of the fullest rank cost all others; `critical_path` the largest forward computation, backward
    computation and volume. The objective is one or the other, or both in shares.
    """

    critical_path_share: float
    prices: ExchangePrices

    @property
    def own(self) -> Floats:
        """[L], of a rank's own exchanges."""
        share = self.critical_path_share
        return np.array([1.0 - share, 0.0, 0.0, share])

    def loads(self, work_ms: Floats, volume: Floats) -> Floats:
        """[n, L], of forward and backward computation [n, 2] and volumes [n]."""
        share = self.critical_path_share
        loads = self.prices.own_byte_ms * volume[:, None] * self.own
        loads[:, 0] += (1.0 - share) * work_ms.sum(axis=1)
        loads[:, 1:3] += share * work_ms
        loads[:, 3] += self.prices.busiest_rank_byte_ms * volume
        return loads


@dataclass(frozen=True, slots=True)
class Problem:
    """A task under a cost model.

    The objective is the sum of the loads' maxima over ranks, and of what all ranks share; see
    `Weights` for the loads.

    Args:
        tables: of each unit, their places in the task.
        step: [U], columns of a step; 0 where a unit may not be split.
        first: [U + 1], where each unit's shapes begin, of 1, 2, ... steps.
        asks: [N, A], what a shape adds to its rank: vector, volume, column shards, and to its loads
            what does not depend on the rest: the margin of pieces, the reduce-scatters of a host.
        load: [N, L], in ms, on a rank that reads what ranks read in the mean.
        margin: [N, L], what of the load is a margin for the model's error on pieces.
        shared_ms: [N], what every rank pays for it.
        size_bytes: [N].
        host_load: [N], ms if its host is the fullest.
        capacity: [W], bytes.
        allowed: [U, W], where pieces of a unit may be; None for anywhere.
        apart: [U, G], groups of units of which no two may share a rank.
        rows, host_rows: as blocks of rows on all ranks, or on those of one host.
    """

    task: ShardingTask
    model: AdditiveCostModel
    hosts: Hosts
    prices: ExchangePrices
    weights: Weights
    tables: tuple[tuple[int, ...], ...]
    step: Indices
    first: Indices
    asks: Floats
    load: Floats
    margin: Floats
    shared_ms: Floats
    size_bytes: Indices
    host_load: Floats
    capacity: Indices
    allowed: Mask | None
    apart: Mask
    rows: Blocks
    host_rows: Blocks | None

    @property
    def world_size(self) -> int:
        return self.hosts.world_size

    @property
    def num_units(self) -> int:
        return len(self.tables)

    @property
    def whole(self) -> Indices:
        """[U], index of the shape that is the whole unit."""
        return self.first[1:] - 1

    @property
    def num_steps(self) -> Indices:
        """[U]."""
        return np.diff(self.first)

    def without_margin(self) -> Problem:
        """The same with pieces at their predicted price."""

        def plain(of: P) -> P:
            asks = of.asks.copy()
            asks[:, -of.load.shape[1] :] -= of.margin
            return dataclasses.replace(
                of, asks=asks, load=of.load - of.margin, margin=np.zeros_like(of.margin)
            )

        rows, host_rows = plain(self.rows), self.host_rows and plain(self.host_rows)
        return dataclasses.replace(plain(self), rows=rows, host_rows=host_rows)

    def work_ms(self, load: Floats) -> Floats:
        """[...], of loads [..., L], a rank's computation, with its exchanges as far as they add."""
        work: Floats = load[..., :3].sum(axis=-1)
        return work

    def work_at(self, cost_ms: float) -> float:
        """What a rank's work may take in a plan of a cost whose ranks' volumes are even."""
        prices, weights = self.prices, self.weights
        num_loads = self.load.shape[1]
        volume, num_shards = self.asks[self.whole].sum(axis=0)[-2 - num_loads : -num_loads]
        per_byte = prices.even_byte_ms - weights.own[0] * prices.own_byte_ms
        shared_ms = prices.fixed_ms + prices.shard_ms * num_shards
        return float(cost_ms - shared_ms - per_byte * volume / self.world_size)

    @classmethod
    def of(
        cls,
        task: ShardingTask,
        model: AdditiveCostModel,
        constraints: Constraints,
        *,
        critical_path_share: float,
        split_error: float,
        max_widths: int = MAX_WIDTHS,
    ) -> Problem:
        """The problem of a task whose tables all have a reuse histogram.

        Args:
            critical_path_share: of the critical path in the objective; the rest is the cost.
            split_error: share of its computation by which a piece of a table is priced higher, so
                that no split is made for a gain that is within the model's error on it.
            max_widths: of a table, see `Shapes.of`.
        """
        shapes = Shapes.of(task, model.compute, max_widths=max_widths)
        block_shapes = shapes.row_blocks
        hosts = model.hosts(task.topology)
        prices = ExchangePrices.of(model.communication, hosts)
        named = {table.name: i for i, table in enumerate(task.tables)}
        together = [group for group in constraints.together if group]
        groups = [tuple(sorted(named[name] for name in group)) for group in together]
        grouped = {table for group in groups for table in group}
        alone = [(table,) for table in range(len(named)) if table not in grouped]
        tables: list[tuple[int, ...]] = sorted([*alone, *groups])
        unsplit = grouped | {named[name] for name in constraints.unsplit}
        kept = _kept_shapes(shapes, tables, unsplit)
        columns = kept.of(shapes.columns)
        single = np.array([group[0] for group in tables])
        read_mb = float(shapes.columns.vectors[shapes.whole, READ_MB].sum()) / hosts.world_size
        partial = np.ones(len(columns.volume), dtype=bool)
        partial[kept.first[1:] - 1] = False
        weights = Weights(critical_path_share, prices)
        pricing = _Pricing(model, prices, weights, split_error, read_mb)
        columns_load, columns_margin = pricing.load(columns, partial * split_error)
        splittable = np.array([len(group) == 1 and group[0] not in unsplit for group in tables])
        allowed = constraints.allowed(tables, named, hosts.world_size)
        apart = constraints.apart_groups(tables, named)
        by_rows = splittable & ~apart.any(axis=1)
        anywhere: Mask = np.ones(len(tables), dtype=bool)
        on_a_host: Mask = anywhere
        if allowed is not None:
            anywhere = np.logical_and.reduce(allowed, axis=1)
            by_host = allowed.reshape(len(tables), -1, hosts.ranks_per_host)
            on_a_host = np.logical_or.reduce(np.logical_and.reduce(by_host, axis=2), axis=1)
        return cls(
            task=task,
            model=model,
            hosts=hosts,
            prices=prices,
            weights=weights,
            tables=tuple(tables),
            step=np.where(splittable, shapes.step[single], 0),
            first=kept.first,
            asks=np.column_stack(
                [columns.vectors, columns.volume, kept.num_shards, columns_margin]
            ),
            load=columns_load,
            margin=columns_margin,
            shared_ms=prices.any_byte_ms * columns.volume + prices.shard_ms * kept.num_shards,
            size_bytes=columns.size_bytes,
            host_load=prices.busiest_host_byte_ms * columns.volume,
            capacity=constraints.capacity(task.topology),
            allowed=allowed,
            apart=apart,
            rows=pricing.blocks(block_shapes[0], single, by_rows & anywhere)
            if block_shapes
            else _no_blocks(columns_load, columns.vectors.shape[1] + 2, len(tables)),
            host_rows=None
            if len(block_shapes) < 2
            else pricing.blocks(block_shapes[1], single, by_rows & on_a_host),
        )


def _no_blocks(load: Floats, num_vector: int, num_units: int) -> Blocks:
    none = np.zeros((num_units, load.shape[1]))
    return Blocks(
        possible=np.zeros(num_units, dtype=bool),
        asks=np.zeros((num_units, num_vector + load.shape[1])),
        load=none,
        margin=none,
        size_bytes=np.zeros((num_units, 1), dtype=np.int64),
        shared_ms=np.zeros(num_units),
        fixed_ms=0.0,
    )


P = TypeVar("P", Problem, Blocks)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Which shapes of tables become those of units; groups are sums of whole tables."""

    first: Indices
    index: Indices
    unit: Indices
    num_shards: Floats

    def of(self, pieces: Pieces) -> Pieces:
        return Pieces(
            vectors=self._sum(pieces.vectors),
            size_bytes=self._sum(pieces.size_bytes),
            volume=self._sum(pieces.volume),
        )

    def _sum(self, values: NDArray[Number]) -> NDArray[Number]:
        sums = np.zeros((self.first[-1], *values.shape[1:]), dtype=values.dtype)
        np.add.at(sums, self.unit, values[self.index])
        return sums


def _kept_shapes(shapes: Shapes, tables: Sequence[tuple[int, ...]], unsplit: set[int]) -> _Kept:
    index: list[int] = []
    shape: list[int] = []
    num_shards: list[float] = []
    num_steps: list[int] = []
    for group in tables:
        begin = len(num_shards)
        if len(group) == 1 and group[0] not in unsplit:
            of_table = range(shapes.first[group[0]], shapes.first[group[0] + 1])
            index += list(of_table)
            shape += list(range(begin, begin + len(of_table)))
            num_shards += [1.0] * len(of_table)
        else:
            index += [int(shapes.whole[table]) for table in group]
            shape += [begin] * len(group)
            num_shards.append(float(len(group)))
        num_steps.append(len(num_shards) - begin)
    return _Kept(
        first=np.concatenate([[0], np.cumsum(num_steps)]),
        index=np.array(index),
        unit=np.array(shape),
        num_shards=np.array(num_shards),
    )


@dataclass(frozen=True, slots=True)
class _Pricing:
    model: AdditiveCostModel
    prices: ExchangePrices
    weights: Weights
    split_error: float
    read_mb: float

    def load(self, pieces: Pieces, error: Floats) -> tuple[Floats, Floats]:
        """[n, L] twice: the load, see `Problem.load`, and how much of it is margin."""
        read_mb = np.maximum(pieces.vectors[:, READ_MB], self.read_mb)
        work = self.model.compute.work_ms(pieces.vectors, read_mb)
        margin = self.weights.loads(work * error[:, None], 0.0 * pieces.volume)
        return self.weights.loads(work, pieces.volume) + margin, margin

    def blocks(self, blocks: BlockShapes, table: Indices, may: Mask) -> Blocks:
        pieces = Pieces(
            blocks.block.vectors[table],
            blocks.block.size_bytes[table],
            blocks.block.volume[table],
        )
        load, margin = self.load(pieces, np.full(len(table), self.split_error))
        extra = margin.copy()
        reduce_volume = blocks.reduce_volume[table]
        shared_ms = self.prices.any_byte_ms * pieces.volume + self.prices.shard_ms
        shared_ms = shared_ms * blocks.group_size
        sizes = np.repeat(pieces.size_bytes[:, None], blocks.group_size, axis=1)
        sizes[:, -1] = blocks.last.size_bytes[table]
        reduce = self.prices.reduces[blocks.group_size]
        if blocks.is_global:
            shared_ms = reduce.byte_ms * reduce_volume + reduce.shard_ms
            has_shard = 0.0
        else:
            reduce_ms = reduce.byte_ms * reduce_volume + reduce.shard_ms
            for of_rank in (load, extra):
                of_rank += reduce_ms[:, None] * self.weights.own
            has_shard = 1.0
        return Blocks(
            possible=blocks.possible[table] & may,
            asks=np.column_stack(
                [pieces.vectors, pieces.volume, np.full(len(table), has_shard), extra]
            ),
            load=load,
            margin=margin,
            size_bytes=sizes,
            shared_ms=shared_ms + np.zeros(len(table)),
            fixed_ms=reduce.fixed_ms,
        )
