"""What a placement of column shards would cost after a change, for many changes at once.

A search holds the sums of every rank; taking a shard from one rank to another changes two of them.
Nothing is computed anew for the other ranks but the maximum.

Letters: N changes, S shards, W ranks, V numbers of a shard (`compute.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.communication import Hosts
from dlrm_sharded.cost.features import FLOAT_BYTES, Floats
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.types import TOTALS

Indices = NDArray[np.int64]


class Placement:
    """Shards on ranks, and the objective of this and of neighbouring placements, in ms.

    Args:
        vectors: [S, V], of `ComputeModel.vectors`.
        num_cols: [S].
        rank: [S].
        objective: one of `TOTALS`.
    """

    def __init__(
        self,
        model: LearnedCostModel,
        hosts: Hosts,
        *,
        batch_size: int,
        vectors: Floats,
        num_cols: Floats,
        rank: Indices,
        objective: str = TOTALS[0],
    ) -> None:
        assert objective in TOTALS, f"{objective} is none of {TOTALS}"
        self._model = model
        self._hosts = hosts
        self._of_critical_path = objective == "critical_path"
        self.rank = rank.copy()
        # a shard's vector, its volume and its count move together
        volume = num_cols * (FLOAT_BYTES * batch_size / hosts.world_size)
        self._shards = np.column_stack([vectors, volume, np.ones(len(rank))])
        self._sums = np.zeros((hosts.world_size, self._shards.shape[1]))
        np.add.at(self._sums, self.rank, self._shards)
        self._compute_ms = self._times_ms(self._sums)

    @property
    def objective_ms(self) -> float:
        """Of the placement as it is."""
        return float(self._objectives(self._compute_ms[None], self._sums[None, :, -2:])[0])

    def after_moves(self, shard: Indices, to: Indices) -> Floats:
        """[N], the objective if shard[i] alone went to rank to[i]."""
        return self._after_transfers(self.rank[shard], to, self._shards[shard])

    def after_swaps(self, one: Indices, other: Indices) -> Floats:
        """[N], the objective if one[i] and other[i] alone changed places."""
        difference = self._shards[one] - self._shards[other]
        return self._after_transfers(self.rank[one], self.rank[other], difference)

    def move(self, shard: int, to: int) -> None:
        """Put one shard on another rank."""
        ranks = [self.rank[shard], to]
        self._sums[ranks[0]] -= self._shards[shard]
        self._sums[to] += self._shards[shard]
        self.rank[shard] = to
        self._compute_ms[ranks] = self._times_ms(self._sums[ranks])

    def _after_transfers(self, source: Indices, target: Indices, moved: Floats) -> Floats:
        changes = np.arange(len(source))
        ends = np.concatenate([self._sums[source] - moved, self._sums[target] + moved])
        times = self._times_ms(ends)
        compute_ms = np.repeat(self._compute_ms[None], len(source), axis=0)
        exchanged = np.repeat(self._sums[None, :, -2:], len(source), axis=0)
        for i, rank in enumerate((source, target)):
            part = slice(i * len(source), (i + 1) * len(source))
            compute_ms[changes, rank] = times[part]
            exchanged[changes, rank] = ends[part, -2:]
        return np.where(
            source == target, self.objective_ms, self._objectives(compute_ms, exchanged)
        )

    def _times_ms(self, sums: Floats) -> Floats:
        """[n, 2], of any ranks' sums."""
        return self._model.compute.times_ms(sums[:, :-2], (sums[:, -1] > 0.5).astype(np.float64))

    def _objectives(self, compute_ms: Floats, exchanged: Floats) -> Floats:
        """[N], of computation [N, W, 2] and of volumes and counts [N, W, 2]."""
        nothing = np.zeros(len(compute_ms))
        comm = [
            self._model.communication.times_ms(
                kind, exchanged[..., 0], exchanged[..., 1], nothing, nothing, self._hosts
            )
            for kind in ("fwd_comm", "bwd_comm")
        ]
        if self._of_critical_path:
            objectives: Floats = compute_ms.max(axis=1).sum(axis=1)
            for times in comm:
                objectives += times.max(axis=1)
            return objectives
        total: Floats = (compute_ms.sum(axis=2) + comm[0] + comm[1]).max(axis=1)
        return total
