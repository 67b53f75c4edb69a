"""The inner search of NeuroShard (arXiv:2305.01868, sec. 3.3): shards go to ranks one by one.

The shards of a node are placed for several limits on the columns of a rank: in descending order of
predicted cost, each goes to the rank with the least computation so far that has memory and columns
left. The placement with the least predicted cost, exchanges included, belongs to the node.

Letters: K shapes, V numbers of a shape, N nodes, S shards of a node, L limits, W ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.shapes import PieceCosts
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats, Indices
from dlrm_sharded.plans.layouts import trained_layouts
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

Node = tuple[int, ...]
"""Shape of every shard; a split puts one half in place of the shard and the other at the end."""


class Costs(Protocol):
    """Costs of a task's shards and ranks."""

    @property
    def task(self) -> ShardingTask:
        """The task, whose tables have access profiles if the costs depend on these."""

    def vectors(self, table: Indices, num_cols: Indices) -> Floats:
        """Return [S, V], the vector of each shard, for some columns of tables, each [S]."""

    def compute_ms(self, sums: Floats) -> Floats:
        """Return [K], computation in both directions of ranks with sums of vectors [K, V]."""

    def exchanges_ms(self, num_cols: Floats, num_shards: Floats) -> Iterator[Floats]:
        """Yield [N, W], exchanges of ranks with columns and shards, each [N, W].

        Columns count once for each vector of a sample.
        """


class AdditiveCosts:
    """Costs of an additive cost model."""

    def __init__(self, costed: CostedTask) -> None:
        self.task = costed.task
        self._pieces = PieceCosts(costed.task, costed.compute)
        self._compute, self._communication = costed.compute, costed.communication
        self._hosts = costed.hosts
        self._col_bytes = FLOAT_BYTES * self.task.batch_size / self.task.topology.world_size

    def vectors(self, table: Indices, num_cols: Indices) -> Floats:
        return self._pieces.columns(table, num_cols).vectors

    def compute_ms(self, sums: Floats) -> Floats:
        times: Floats = self._compute.times_ms(sums, np.ones(len(sums))).sum(axis=1)
        return times

    def exchanges_ms(self, num_cols: Floats, num_shards: Floats) -> Iterator[Floats]:
        volume = num_cols * self._col_bytes
        for kind in STEP_EXCHANGES:
            yield self._communication.all_to_all_ms(kind, volume, num_shards, self._hosts)


@dataclass(frozen=True, slots=True)
class ShardShapes:
    """Shapes of shards: all tables and their halves, quarters, ..., by descending cost.

    Args:
        whole: shape of each whole table.
        half: the shape with half the columns, for each shape that can be halved.
        table: [K], index of the table in the task.
        num_cols, size_bytes: [K].
        vectors: [K, V], see `ComputeModel.vectors`.
    """

    whole: Node
    half: dict[int, int]
    table: Indices
    num_cols: Indices
    size_bytes: Indices
    vectors: Floats

    @classmethod
    def from_costs(cls, costs: Costs) -> ShardShapes:
        task = costs.task
        shapes = [
            (i, width)
            for i, table in enumerate(task.tables)
            for width in _widths(table, task.topology)
        ]
        table, num_cols = np.array(shapes).T
        vectors = costs.vectors(table, num_cols)
        order = np.argsort(-costs.compute_ms(vectors), kind="stable")
        size_bytes = np.array([_size_bytes(task, i, width) for i, width in shapes])
        place = {shapes[k]: i for i, k in enumerate(order.tolist())}
        return cls(
            whole=tuple(place[i, table.embedding_dim] for i, table in enumerate(task.tables)),
            half={
                shape: place[i, width // 2]
                for (i, width), shape in place.items()
                if (i, width // 2) in place
            },
            table=table[order],
            num_cols=num_cols[order],
            size_bytes=size_bytes[order],
            vectors=vectors[order],
        )

    def are_wide_for(self, task: ShardingTask) -> bool:
        """Return whether two of the widest unsplittable shards exceed a rank's mean columns."""
        widest = max(
            cols for shape, cols in enumerate(self.num_cols.tolist()) if shape not in self.half
        )
        total = sum(table.embedding_dim for table in task.tables)
        return total < 2 * widest * task.topology.world_size


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every shard of a node; the cost is infinite if no placement was found."""

    cost_ms: float
    shapes: Indices
    ranks: Indices


class GreedyGrid:
    """The inner search, vectorized over nodes and limits, whose placements are independent."""

    def __init__(self, costs: Costs, shapes: ShardShapes, limits: Floats) -> None:
        task = costs.task
        self._costs = costs
        self._shapes = shapes
        vectors = np.array([table.vectors_per_sample for table in task.tables])
        self._sent_cols = shapes.num_cols * vectors[shapes.table]
        total = sum(table.embedding_dim for table in task.tables)
        self._max_cols = limits * (total / task.topology.world_size)
        self._max_shard_cols = task.topology.max_shard_columns
        self._max_bytes = np.array(task.topology.rank_memory_bytes)

    def place(self, nodes: Sequence[Node]) -> list[Placement]:
        """Return the best placement of each node; all nodes have the same number of shards.

        Nodes that differ only in the order of their shards have the same placement.
        """
        # shapes are numbered by descending cost, so sorted nodes are in the order of placement
        in_order = [tuple(sorted(node)) for node in nodes]
        distinct = list(dict.fromkeys(in_order))
        placed = dict(zip(distinct, self._place(np.array(distinct)), strict=True))
        return [placed[node] for node in in_order]

    def _place(self, nodes: Indices) -> Iterator[Placement]:
        """Yield the placements of nodes [N, S], whose shards are in the order of placement."""
        shapes = self._shapes
        num_nodes, num_shards = nodes.shape
        runs = (num_nodes, len(self._max_cols))
        # one greedy run for each node and limit, [N, L]; its ranks are the next axis
        by_rank = (*runs, len(self._max_bytes))
        sums = np.zeros((*by_rank, shapes.vectors.shape[1]))
        used = np.zeros(by_rank, dtype=np.int64)
        cols, sent, count, rank_ms = (np.zeros(by_rank) for _ in range(4))
        ranks = np.zeros((*runs, num_shards), dtype=np.int64)
        found = np.ones(runs, dtype=bool)
        run = tuple(np.indices(runs))
        for i, shape in enumerate(nodes.T):
            vector = shapes.vectors[shape][:, None]
            size, width = (x[shape][:, None] for x in (shapes.size_bytes, shapes.num_cols))
            fits = (used + size[..., None] <= self._max_bytes) & (
                cols + width[..., None] <= self._max_cols[:, None]
            )
            fits &= width[..., None] <= self._max_shard_cols
            found &= fits.any(axis=-1)
            times = np.where(fits, rank_ms, np.inf)
            # of several ranks with the least computation, the one with the least memory used
            is_least = times == times.min(axis=-1, keepdims=True)
            rank = np.where(is_least, used, np.inf).argmin(axis=-1)
            ranks[..., i] = rank
            sums[(*run, rank)] += vector
            used[(*run, rank)] += size
            cols[(*run, rank)] += width
            sent[(*run, rank)] += self._sent_cols[shape][:, None]
            count[(*run, rank)] += 1
            rank_ms[(*run, rank)] = self._compute_ms(sums[(*run, rank)])
        costs = np.where(found, self._costs_ms(rank_ms, sent, count), np.inf)
        for limit_costs, limit_ranks, node in zip(costs, ranks, nodes, strict=True):
            best = int(limit_costs.argmin())
            yield Placement(float(limit_costs[best]), node, limit_ranks[best])

    def _compute_ms(self, sums: Floats) -> Floats:
        """Return [...], computation in both directions of ranks with sums [..., V]."""
        flat = sums.reshape(-1, sums.shape[-1])
        return self._costs.compute_ms(flat).reshape(sums.shape[:-1])

    def _costs_ms(self, rank_ms: Floats, sent: Floats, count: Floats) -> Floats:
        """Return [N, L], `PlanCost.cost_ms` from computation, columns and shards, all [N, L, W]."""
        totals = rank_ms.copy()
        num_ranks = totals.shape[-1]
        num_cols, num_shards = sent.reshape(-1, num_ranks), count.reshape(-1, num_ranks)
        for times in self._costs.exchanges_ms(num_cols, num_shards):
            totals += times.reshape(totals.shape)
        return totals.max(axis=-1)


def _size_bytes(task: ShardingTask, table: int, num_cols: int) -> int:
    """Return the memory of some columns of a table, given by its index in the task."""
    whole = task.tables[table]
    return task.topology.table_bytes(dataclasses.replace(whole, embedding_dim=num_cols))


def _widths(table: Table, topology: Topology) -> Iterator[int]:
    """Yield a table's columns, half of them, a quarter, ..., as long as they are multiples of 4.

    If the columns may not be split, all columns are the only width.
    """
    num_cols = table.embedding_dim
    yield num_cols
    while num_cols % (2 * COLUMN_MULTIPLE) == 0 and "columns" in trained_layouts(table, topology):
        num_cols //= 2
        yield num_cols
