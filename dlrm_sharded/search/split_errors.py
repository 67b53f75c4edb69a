"""By how much a piece of a table is priced higher, as the gain of a split may be an error.

A split compares a whole table with its pieces. What a piece with the share s of the table costs
beyond the share s of the table's parts,

    d = parts(piece) - s parts(table),

is what splitting adds; the shares of all pieces are 1 together. Its standard error is sqrt(d' C d),
where C is the covariance of the logarithms of the parts' factors (`ComputeModel.uncertainty`).
Errors that a piece has in common with the table cancel: a part that divides evenly has d = 0. So
do those of all times: if all are wrong by one factor, the better of two plans stays the better
one. Therefore the factor of the task's whole tables counts as known, which takes w sum(d) from d,
where w are the shares of the parts in the times of these tables.

A search needs margins that add up. The standard error of a sum is at most the sum of the standard
errors (the triangle inequality, as sqrt(d' C d) is a norm), so the margins of a table's pieces are
at least the standard error of the whole comparison: a split is made when its expected gain exceeds
that. A gain as large as its standard error is real in 84 of 100 cases.

Letters: N column shapes, T tables, S shards, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.shapes import Indices, PiecePricer, Shapes
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.layouts import REPLICA_GROUP

UNKNOWN_ERROR = 0.05
"""Share by which a piece is priced higher under prices that say nothing of their uncertainty."""

LEAST_ERROR = 0.01
"""Least share, for what no factor of a part can express."""

LEAST_MS = 1e-9
"""Time that stands for zero where shares are taken."""


@dataclass(frozen=True, slots=True)
class SplitErrors:
    """Shares of its computation by which a piece is priced higher, forward and backward.

    Args:
        columns: [N, 2], of column shapes; 0 for whole tables, as there is nothing to decide.
        row_blocks: [T, 2], for each size of groups that `Shapes` has.
        replicas: [T, 2].
    """

    columns: Floats
    row_blocks: tuple[Floats, ...]
    replicas: Floats

    @classmethod
    def stated(cls, share: float, shapes: Shapes) -> SplitErrors:
        """Return the same share for all pieces."""
        of_tables = np.full((len(shapes.step), 2), share)
        columns = np.full((len(shapes.table), 2), share)
        columns[shapes.whole] = 0.0
        return cls(columns, (of_tables,) * len(shapes.row_blocks), of_tables)

    @classmethod
    def of_prices(cls, priced: PricedTask, shapes: Shapes) -> SplitErrors:
        """Return shares that follow from how uncertain the prices are; one share if none says."""
        uncertainty = priced.compute.uncertainty
        if uncertainty is None:
            return cls.stated(UNKNOWN_ERROR, shapes)
        parts = _Parts(priced, shapes, uncertainty)
        first = shapes.first[:-1][shapes.table]
        cols = parts.dims[shapes.table]
        cols = np.minimum((np.arange(len(first)) - first + 1) * shapes.step[shapes.table], cols)
        columns = parts.errors(shapes.table, cols=cols, number=np.maximum(shapes.num_shards, 1))
        columns[shapes.whole] = 0.0
        every = np.arange(len(parts.dims))
        blocks = tuple(parts.errors(every, group_size=cut.group_size) for cut in shapes.row_blocks)
        return cls(columns, blocks, parts.errors(every, group_size=REPLICA_GROUP))


class _Parts:
    """Parts of the times of pieces of a task's tables, and their standard errors."""

    def __init__(self, priced: PricedTask, shapes: Shapes, uncertainty: Floats) -> None:
        task, self._compute = priced.task, priced.compute
        self._pricer, self._roots = PiecePricer(task, priced.compute), _roots(uncertainty)
        self.dims = np.array([table.embedding_dim for table in task.tables])
        self._rows = np.array([table.num_embeddings for table in task.tables])
        self._world_size = task.topology.world_size
        read_mb = shapes.columns.vectors[shapes.whole, READ_MB]
        self._mean_read_mb = float(read_mb.sum()) / self._world_size
        self._whole = self._parts_ms(np.arange(len(self.dims)), self._rows, self.dims, 1)
        total = self._whole.sum(axis=1)
        self._shares = total / np.maximum(total.sum(axis=1, keepdims=True), LEAST_MS)

    def errors(
        self,
        table: Indices,
        *,
        cols: Indices | None = None,
        number: Indices | None = None,
        group_size: int = 1,
    ) -> Floats:
        """Return [n, 2], standard errors of pieces relative to their computation.

        Args:
            table: [n], places of the tables in the task.
            cols: [n], columns of pieces; None for row blocks or replicas of the group.
            number: [n], equal shards that have these columns.
        """
        rows, dims = self._rows[table], self.dims[table]
        if cols is not None and number is not None:
            parts = self._parts_ms(table, rows, cols // number, 1) * number[:, None]
            share = cols / dims
        elif group_size == REPLICA_GROUP:
            parts = self._parts_ms(table, rows, dims, group_size)
            share = np.full(len(table), 1.0 / self._world_size)
        else:
            parts = self._parts_ms(table, -(-rows // group_size), dims, group_size)
            share = np.full(len(table), 1.0 / group_size)
        added = parts - share[:, None] * self._whole[:, table]
        added -= added.sum(axis=2, keepdims=True) * self._shares[:, None]
        deviations = np.linalg.norm(added @ self._roots, axis=2)
        found: Floats = (deviations / np.maximum(parts.sum(axis=2), LEAST_MS)).T
        return np.maximum(found, LEAST_ERROR)

    def _parts_ms(self, table: Indices, rows: Indices, cols: Indices, group_size: int) -> Floats:
        """Return [2, n, P] on ranks that read as much as ranks do on average, or the piece."""
        workload = self._pricer.workload(table, rows, cols, group_size=group_size)
        read_mb = np.maximum(workload.unique_bytes() / 1e6, self._mean_read_mb)
        return self._compute.work_parts_ms(workload, read_mb)


def _roots(covariance: Floats) -> Floats:
    """Return [2, P, P], matrices R with R R' = C; also where C is singular."""
    values, vectors = np.linalg.eigh(covariance)
    roots: Floats = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    return roots
