"""Loads of pieces, row blocks and replicas for the search.

Letters: U units, L loads, T tables, n pieces, V numbers of a shard (`cost/compute.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.compute import READ_MB, ComputeModel
from dlrm_sharded.cost.exchange_costs import ExchangeCosts, ReduceCosts
from dlrm_sharded.cost.shapes import BlockShapes, Pieces, Shapes
from dlrm_sharded.cost.workload import Floats, Indices, Mask
from dlrm_sharded.search.loads import NUM_LOADS, LoadWeights
from dlrm_sharded.search.problem import Blocks, Demand


@dataclass(frozen=True, slots=True)
class PieceLoads:
    """What pieces add to the loads of a rank.

    Args:
        split_error: share that is added to the computation of a piece of a table.
        mean_read_mb: MB that a rank reads in a step on average.
    """

    compute: ComputeModel
    exchange_costs: ExchangeCosts
    weights: LoadWeights
    split_error: float
    mean_read_mb: float

    def load(self, pieces: Pieces, error: float | Floats) -> tuple[Floats, Floats]:
        """Return the loads [n, L] of pieces, and how much of them is margin.

        Args:
            error: share, or [n, 1] shares, that is added to the computation of a piece.
        """
        # Unit costs rise with what the whole rank reads.
        compute_ms = self._work_ms(pieces)
        margin = self.weights.loads(compute_ms * error, 0.0 * pieces.volume)
        return self.weights.loads(compute_ms, pieces.volume) + margin, margin

    def blocks(
        self,
        cut: BlockShapes,
        table: Indices,
        is_allowed: Mask,
        groups: range,
        *,
        of_sequences: bool,
    ) -> Blocks:
        """Return one kind of row blocks of all units, or their replicas.

        Args:
            table: [U], the table of each unit that may be split.
            is_allowed: [U], whether constraints allow the unit to have such blocks.
        """
        costs = self.exchange_costs
        reduce = costs.gradients if cut.is_replica else costs.reduces[cut.group_size]
        if of_sequences:  # an all-to-all takes the place of the reduction
            reduce = ReduceCosts(costs.fixed_ms, 0.0, 0.0)
        reduce_ms = reduce.byte_ms * cut.reduce_volume[table] + reduce.shard_ms
        piece, last = cut.block.take(table), cut.last.take(table)
        load, margin = self.load(piece, self.split_error)
        surcharge = margin.copy()  # `load` and `surcharge` are both added to below
        # a view, because there may be many tables and ranks
        size_bytes = np.broadcast_to(piece.size_bytes[:, None], (len(table), cut.group_size))
        if not cut.is_replica:
            size_bytes = size_bytes.copy()
            size_bytes[:, -1] = last.size_bytes
        num_shards = 1.0 if of_sequences or not cut.is_global else 0.0
        any_ms = costs.any_byte_ms * piece.volume + costs.shard_ms * num_shards
        shared_ms = any_ms * cut.group_size
        fixed_load = np.zeros(NUM_LOADS)
        if cut.is_global:  # see `Blocks.is_global`
            shared_ms += reduce_ms
        else:
            reduce_load = reduce_ms[:, None] * self.weights.exchange
            load += reduce_load
            surcharge += reduce_load
            fixed_load = reduce.fixed_ms * self.weights.exchange
        return Blocks(
            group_size=cut.group_size,
            groups=groups,
            is_replica=cut.is_replica,
            possible=cut.possible[table] & is_allowed,
            demand=Demand.pack(
                piece.vectors, piece.volume, np.full(len(table), num_shards), surcharge
            ),
            missing=Demand.pack(
                piece.vectors - last.vectors,
                piece.volume - last.volume,
                np.zeros(len(table)),
                np.zeros_like(surcharge),
            ),
            load=load,
            margin=margin,
            size_bytes=size_bytes,
            shared_ms=shared_ms,
            fixed_ms=reduce.fixed_ms,
            fixed_load=fixed_load,
        )

    def replica_gain_ms(self, shapes: Shapes, *, has_margin: bool = True) -> Floats:
        """Return [T], how much less a replica of a table costs than the table on a single rank.

        These are means over ranks, without what the first replica costs. A replica has the
        margin of a split. On one rank, there is nothing to gain.
        """
        if shapes.replicas is None:
            return np.zeros(len(shapes.step))
        whole = shapes.columns.take(shapes.whole)
        costs = self.exchange_costs
        exchange_ms = costs.even_byte_ms * whole.volume / costs.num_ranks + costs.shard_ms
        whole_ms = self._work_ms(whole).sum(axis=1) / costs.num_ranks + exchange_ms
        error = self.split_error if has_margin else 0.0
        replica_ms = self._work_ms(shapes.replicas.block) * (1.0 + error)
        replica_ms = replica_ms.sum(axis=1)
        replica_ms += costs.gradients.byte_ms * shapes.replicas.reduce_volume
        return whole_ms - replica_ms

    @property
    def first_replica_ms(self) -> float:
        """Time that every rank pays as soon as there is a replica of any size."""
        launches_ms = self.compute.launch_ms(np.array([1.0, 2.0])).sum(axis=1)
        return self.exchange_costs.gradients.fixed_ms + float(launches_ms[1] - launches_ms[0])

    def _work_ms(self, pieces: Pieces) -> Floats:
        """Return [n, 2], computation of pieces where ranks read as much as they do on average."""
        return self.compute.work_ms(pieces.vectors, self._crowd(pieces))

    def _crowd(self, pieces: Pieces) -> Floats:
        """Return [n, V], the piece's vector, with at least the mean MB that ranks read."""
        crowd = pieces.vectors.copy()
        crowd[:, READ_MB] = np.maximum(crowd[:, READ_MB], self.mean_read_mb)
        return crowd
