"""The workload of a plan: its shards as arrays, and the exchanges that they cause.

Letters: S shards, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.local_profiles import USES_OF_BIN, Floats, local_histograms
from dlrm_sharded.plans.layouts import REPLICA_GROUP, layout_of
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

FLOAT_BYTES, ID_BYTES = 4.0, 4.0
"""Sizes of a pooled or gradient value and of an id in an exchange."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """A reduce-scatter (or all-gather) among the ranks of every group of one size.

    Args:
        volume: [W], bytes that a rank exchanges with each other one of its group.
        num_shards: [W], shards of a rank that take part.
        num_launches: [W], modules of a rank that reduce, each by itself.
    """

    group_size: int
    volume: Floats
    num_shards: Floats
    num_launches: Floats


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of a step: an all-to-all among all ranks, and reductions within groups.

    Args:
        volume: [W], bytes that a rank exchanges with each other one in the all-to-all.
        num_shards: [W], shards of a rank that take part in it.
        reduces: reductions of row blocks, the largest groups first; empty without row blocks.
        replica_bytes: weights of one rank's replicas, whose gradients all ranks average in the
            backward pass; 0 without replicas, and in an exchange of ids.
        num_launches: number of all-to-alls that carry the volume: one of each module.
        num_replica_launches: number of modules that average gradients.
    """

    volume: Floats
    num_shards: Floats
    reduces: tuple[Reduce, ...]
    replica_bytes: float = 0.0
    num_launches: int = 1
    num_replica_launches: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The shards of one plan, as arrays [S].

    Args:
        group_size: number of ranks that hold the row blocks of the shard's table; 1 for a column
            shard, and `REPLICA_GROUP` for a replica. TorchRec has one lookup module for each size,
            see `layouts.Layout`.
        num_ids: ids that reach the shard in one step.
        reuse_histogram: [S, 17], of those ids: a replica sees the samples of its rank alone.
        is_half: [S], whether the weights are in fp16.
        num_features: [S], features that look up the shard.
        is_sequence: [S], whether the vectors of a sample's ids are not pooled.
        owner: [S], number of the module of the shard's table, see `owners`.
    """

    world_size: int
    ranks_per_host: int
    batch_size: int
    rank: Indices
    group_size: Indices
    num_rows: Floats
    num_cols: Floats
    num_ids: Floats
    reuse_histogram: Floats
    is_half: Mask
    num_features: Floats
    is_sequence: Mask
    owner: Indices

    @property
    def is_replica(self) -> Mask:
        """[S], whether the shard is a replica."""
        return self.group_size == REPLICA_GROUP

    @property
    def num_samples(self) -> Floats:
        """[S], samples of a step that the shard looks up: for a replica, its rank's samples."""
        return np.where(self.is_replica, self.batch_size / self.world_size, self.batch_size)

    @property
    def num_bags(self) -> Floats:
        """[S], lists of ids of a step that the shard looks up: one of each sample and feature."""
        return self.num_samples * self.num_features

    @property
    def num_vectors(self) -> Floats:
        """[S], vectors that a step looks up: one for each bag, or for each id of a sequence."""
        return np.where(self.is_sequence, self.num_ids, self.num_bags)

    @property
    def reduce_size(self) -> Indices:
        """[S], number of ranks that reduce the shard's vectors among themselves.

        Row blocks of sequences have whole vectors, which their ranks exchange as if the blocks were
        column shards.
        """
        return np.where(self.is_sequence, np.minimum(self.group_size, 1), self.group_size)

    def vector_bytes(self, sequences: Sequence[float] | Floats = (1.0, 1.0)) -> Floats:
        """Return [S], bytes of a shard's vectors that its rank exchanges with every other one.

        Args:
            sequences: what a byte of whole sequences and of their row blocks counts as, see
                `CommunicationModel`.
        """
        num_bytes = self.num_cols * self.num_vectors * (FLOAT_BYTES / self.world_size)
        counts = np.where(self.group_size > 1, sequences[1], sequences[0])
        return np.where(self.is_sequence, num_bytes * counts, num_bytes)

    @property
    def num_unique(self) -> Floats:
        """[S], distinct ids of a step by the histogram, at most the numbers of ids and rows."""
        return np.minimum(self.num_ids / self.uses(), self.num_rows)

    def uses(self) -> Floats:
        """Return [S], mean number of times that a step uses an id, over the ids that it uses."""
        return np.maximum(self.reuse_histogram @ USES_OF_BIN, 1.0)

    def unique_bytes(self) -> Floats:
        """Return [S], bytes of the distinct weights that one step reads."""
        return self.num_unique * self.num_cols * self.weight_bytes()

    def weight_bytes(self) -> Floats:
        """Return [S], bytes of a weight."""
        return np.where(self.is_half, FLOAT_BYTES / 2, FLOAT_BYTES)

    def by_rank(self, values: Floats) -> Floats:
        """Return [W, ...], sums over each rank's shards of values [S, ...]."""
        sums = np.zeros((self.world_size, *values.shape[1:]))
        # add.at, because a plain += would count only one of a rank's shards
        np.add.at(sums, self.rank, values)
        return sums

    @property
    def module(self) -> Indices:
        """[S], number of the fused lookup module that serves the shard."""
        key = self.group_size + self.owner * (self.world_size + 1)
        return np.unique(key, return_inverse=True)[1]

    def num_lookups(self, among: Mask | None = None) -> Floats:
        """Return [W], number of fused lookup modules that have a shard on the rank.

        Args:
            among: [S], shards that count; None for all.
        """
        module = self.module
        counts = np.ones_like(self.is_half) if among is None else among
        present = np.zeros((self.world_size, module.max(initial=-1) + 1))
        # shards of one module share a launch, so a module counts once on a rank
        present[self.rank[counts], module[counts]] = 1.0
        return present.sum(axis=1)

    def exchange(
        self, *, for_ids: bool, sequences: Sequence[float] | Floats = (1.0, 1.0)
    ) -> Exchange:
        """Return the exchange of ids and lengths of bags, or else the exchange of vectors.

        Args:
            sequences: see `vector_bytes`.
        """
        if for_ids:
            group_size = self.group_size
            num_bytes = (self.num_ids + self.num_bags) * (ID_BYTES / self.world_size)
        else:
            group_size, num_bytes = self.reduce_size, self.vector_bytes(sequences)
        # The ranks of a group reduce the pooled vectors of all samples among themselves. If other
        # ranks are left, each then exchanges its part of the vectors with the other groups, as if
        # it were a column shard. Ids reach such groups by the all-to-all; a group of all ranks
        # has its own exchange of ids.
        in_all_to_all = (group_size < self.world_size) | (self.world_size == 1)
        in_all_to_all &= ~self.is_replica  # replicas have the samples of their rank to begin with
        # row blocks of sequences have their own all-to-all
        owner = 2 * self.owner + (self.group_size > group_size)
        parts = 1 if for_ids else np.maximum(group_size, 1)
        return Exchange(
            volume=self.by_rank(num_bytes * in_all_to_all / parts),
            num_shards=self.by_rank(in_all_to_all.astype(np.float64)),
            reduces=tuple(
                self._reduce(int(size), group_size == size, num_bytes)
                for size in np.unique(group_size)[::-1]
                if size == self.world_size > 1 or (size > 1 and not for_ids)
            ),
            # every rank has the same replicas
            replica_bytes=0.0 if for_ids else float(self.by_rank(self.replica_bytes())[0]),
            num_launches=len(np.unique(owner[in_all_to_all])),
            num_replica_launches=len(np.unique(owner[self.is_replica])),
        )

    def replica_bytes(self) -> Floats:
        """Return [S], bytes of a replica's weights, as many as of their gradients; else 0."""
        return self.num_rows * self.num_cols * FLOAT_BYTES * self.is_replica

    def _reduce(self, group_size: int, is_in_group: Mask, num_bytes: Floats) -> Reduce:
        in_group = is_in_group.astype(np.float64)
        num_groups = self.world_size // group_size
        return Reduce(
            group_size=group_size,
            volume=self.by_rank(num_bytes * num_groups * in_group),
            num_shards=self.by_rank(in_group),
            num_launches=self.num_lookups(is_in_group),
        )


class TableArrays:
    """The tables of a job as arrays [T], from which workloads take their shards."""

    def __init__(self, tables: Sequence[Table], topology: Topology, batch_size: int) -> None:
        self._topology, self._batch_size = topology, batch_size
        none = (0.0,) * NUM_REUSE_BINS
        self.num_rows = np.array([table.num_embeddings for table in tables], dtype=np.int64)
        self.num_cols = np.array([table.embedding_dim for table in tables], dtype=np.int64)
        self.pooling_factor = np.array([table.pooling_factor for table in tables], dtype=np.float64)
        self.reuse_histogram = np.array([table.reuse_histogram or none for table in tables])
        self.is_half = np.array([table.precision == "fp16" for table in tables])
        self.num_features = np.array([table.num_features for table in tables], dtype=np.float64)
        self.is_sequence = np.array([not table.pooled for table in tables])
        self.owner = owners(tables)

    def workload(
        self,
        table: Indices,
        num_rows: Indices,
        num_cols: Indices,
        rank: Indices,
        group_size: Indices,
    ) -> Workload:
        """Return parts of tables as shards; the histograms of tables without one are zeros.

        Column shards look up all ids of their table, row blocks the ids of their rows, and replicas
        the ids of their rank's samples.

        Args:
            table: [S], index of the shard's table.
            num_rows, num_cols, rank, group_size: [S], see `Workload`.
        """
        world_size, is_replica = self._topology.world_size, group_size == REPLICA_GROUP
        num_ids = self._batch_size * self.pooling_factor[table] * num_rows / self.num_rows[table]
        histograms = self.reuse_histogram[table]
        histograms[is_replica] = local_histograms(histograms[is_replica], world_size)
        return Workload(
            world_size=world_size,
            ranks_per_host=self._topology.ranks_per_host,
            batch_size=self._batch_size,
            rank=rank,
            group_size=group_size,
            num_rows=num_rows.astype(np.float64),
            num_cols=num_cols.astype(np.float64),
            num_ids=np.where(is_replica, num_ids / world_size, num_ids),
            reuse_histogram=histograms,
            is_half=self.is_half[table] & ~is_replica,
            num_features=self.num_features[table],
            is_sequence=self.is_sequence[table],
            owner=self.owner[table],
        )


def workload_of_plan(plan: ShardingPlan, task: ShardingTask) -> Workload:
    """Return the shards of a valid plan, in its order; see `profiles.with_profiles`."""
    tables = with_precisions(task, plan).tables
    place = {table.name: i for i, table in enumerate(tables)}
    group_size = {
        name: layout_of(shards, tables[place[name]], task.topology).group_size
        for name, shards in plan.shards_by_table().items()
    }
    shards = [
        (place[shard.table], shard.num_rows, shard.num_cols, shard.rank, group_size[shard.table])
        for shard in plan.shards
    ]
    arrays = TableArrays(tables, task.topology, task.batch_size)
    return arrays.workload(*np.array(shards).T)


def workload_of_tables(tables: Sequence[Table], batch_size: int) -> Workload:
    """Return whole tables on the only rank of a job."""
    arrays = TableArrays(tables, Topology(world_size=1, memory_bytes=1), batch_size)
    table = np.arange(len(tables))
    rank, group_size = np.zeros_like(table), np.ones_like(table)
    return arrays.workload(table, arrays.num_rows, arrays.num_cols, rank, group_size)


def owners(tables: Sequence[Table]) -> Indices:
    """Return [T], numbers of the tables' modules; bags and sequences are never in the same one."""
    keys = [(table.module, table.pooled) for table in tables]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return np.array([number[key] for key in keys], dtype=np.int64)
