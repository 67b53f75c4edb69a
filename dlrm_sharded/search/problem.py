"""The search problem as arrays: units, the shapes they can take, and what each adds to a rank.

The words unit, shape, step, load, margin, kind and group are explained in the glossary of
`dlrm_sharded/search/__init__.py`; `build_problem.py` makes a problem from a task.

Letters: U units, N shapes of all units, L loads, W ranks, K kinds of row blocks,
V numbers of a shard (`cost/compute.py`), D = V + 2 + L.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.exchange_costs import ExchangeCosts
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.workload import Floats, Indices, Mask
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.loads import NUM_LOADS, Load, LoadWeights

Number = TypeVar("Number", bound=np.generic)


class Demand:
    """The columns of an array of demands [..., D], what a piece adds to its rank.

    Demands add up: the loads of a rank follow from the sum over its pieces.
    """

    VECTOR = slice(0, -2 - NUM_LOADS)
    """The numbers from which the cost model computes the rank's computation."""
    VOLUME = -2 - NUM_LOADS
    """Bytes that the rank exchanges with every other rank."""
    NUM_SHARDS = -1 - NUM_LOADS
    """Shards that take part in the all-to-all."""
    SURCHARGE = slice(-NUM_LOADS, None)
    """Loads [L] that are simply added, such as margins."""

    @staticmethod
    def pack(vectors: Floats, volume: Floats, num_shards: Floats, surcharge: Floats) -> Floats:
        """Return demands [n, D] with these columns."""
        return np.column_stack([vectors, volume, num_shards, surcharge])


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Consecutive ranks that can hold a unit together, each with one row block or replica of it.

    Args:
        layout: how they hold it.
        kind: index into `Problem.blocks`.
    """

    layout: RowBlocks | Replicas
    kind: int

    @property
    def ranks(self) -> range:
        return self.layout.ranks

    @property
    def members(self) -> slice:
        """The ranks as an index of arrays [W, ...]; unlike a range, it makes no copy."""
        return slice(self.ranks.start, self.ranks.stop)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One kind of row blocks: units cut into one block for each rank of a group of this size.

    Replicas are such a kind, too. Their blocks are whole units on all ranks, and all ranks reduce
    gradients. Row blocks of sequences are a different kind from those of pooled tables: nothing is
    reduced, and each block adds to the volume of its rank as a column shard does.

    Args:
        groups: indices into `Problem.groups` of the groups that can hold them.
        is_replica: whether the blocks are replicas.
        possible: [U], whether the unit has enough rows, and constraints allow some group.
        demand: [U, D], what one block adds to its rank.
        missing: [U, D], how much less the last block adds, because it may have fewer rows.
        load: [U, L], its loads, as for column shapes.
        margin: [U, L], the part of these loads that is margin.
        size_bytes: [U, group_size], memory of each block; the last one may be the smallest.
        shared_ms: [U], what every rank of the task pays for the unit.
        fixed_ms: time that the reductions of a group take however little they carry, or the
            all-to-alls of row blocks of sequences; each module pays it for itself.
        fixed_load: [L], that time as a load of the group's ranks; zeros if all ranks pay it.
    """

    group_size: int
    groups: range
    is_replica: bool
    possible: Mask
    demand: Floats
    missing: Floats
    load: Floats
    margin: Floats
    size_bytes: Indices
    shared_ms: Floats
    fixed_ms: float
    fixed_load: Floats

    @property
    def is_global(self) -> bool:
        """Return whether one group of all ranks holds these blocks.

        Every rank then waits for the same reduction, so its time is shared, not a rank's own load.
        Each rank has its samples' vectors afterwards, so no all-to-all follows. Sequences have an
        all-to-all in place of the reduction, in addition to that of column pieces.
        """
        return len(self.groups) == 1

    @property
    def fixed_shared_ms(self) -> float:
        """Time that all ranks pay as soon as any unit lies in these blocks."""
        return self.fixed_ms if self.is_global else 0.0


@dataclass(frozen=True, slots=True)
class Problem:
    """A task under a cost model; the objective is `State.objective_ms`.

    Args:
        tables: places in the task of each unit's tables.
        owners: numbers of the modules of each unit's tables, see `workload.owners`.
        columns_per_step: [U], 0 for units that may not be split.
        first_shape: [U + 1], index of each unit's first shape; its shapes have 1, 2, ... steps.
        possible: [N], whether lookups support the widths of the shape.
        demand: [N, D], what a column shape adds to its rank.
        load: [N, L], the same in ms, on a rank that reads as much as ranks do on average.
        margin: [N, L], part of the load that allows for the model's error on partial tables.
        shared_ms: [N], what every rank pays for the shape.
        size_bytes: [N], memory.
        capacity_bytes: [W], memory of each rank for tables.
        allowed: [U, W], ranks that may hold pieces of the unit; None if all may hold everything.
        separated: [U, S], members of sets of units no two of which may share a rank.
        blocks: [K] kinds of row blocks; the last one may be replicas.
        groups: all groups of ranks, ordered by kind.
        replica_gain_ms: [U], how much less a replica costs than the whole unit, averaged over
            ranks and apart from the cost of the first replica.
        must_replicate: [U], units that must be replicas.
        most_steps: [N], largest width of a shard; wider pieces are several equal ones. None if
            every piece is one shard.
    """

    costed: CostedTask
    exchange_costs: ExchangeCosts
    weights: LoadWeights
    tables: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, ...], ...]
    columns_per_step: Indices
    first_shape: Indices
    possible: Mask
    demand: Floats
    load: Floats
    margin: Floats
    shared_ms: Floats
    size_bytes: Indices
    capacity_bytes: Indices
    allowed: Mask | None
    separated: Mask
    blocks: tuple[Blocks, ...]
    groups: tuple[RankGroup, ...]
    replica_gain_ms: Floats
    must_replicate: Mask
    most_steps: Indices | None = None

    @property
    def task(self) -> ShardingTask:
        return self.costed.task

    @property
    def hosts(self) -> Hosts:
        return self.costed.hosts

    @property
    def world_size(self) -> int:
        return self.hosts.world_size

    @property
    def num_units(self) -> int:
        return len(self.tables)

    @property
    def num_owners(self) -> int:
        """Number of modules."""
        return max(map(max, self.owners)) + 1

    @property
    def whole_shape(self) -> Indices:
        """[U], index of the shape that is the whole unit."""
        return self.first_shape[1:] - 1

    @property
    def num_steps(self) -> Indices:
        """[U], steps of the whole unit."""
        return np.diff(self.first_shape)

    @property
    def restricts_ranks(self) -> bool:
        """Return whether constraints, not only memory, keep some unit away from a rank."""
        return self.allowed is not None or self.separated.size > 0

    def shape(self, unit: int, width: int) -> int:
        """Return the index of the shape of a unit that has `width` steps."""
        return int(self.first_shape[unit]) + width - 1

    def host_load(self, shape: Indices) -> Floats:
        """Return the time [...] that shapes add to the exchanges of their host, in ms."""
        return self.exchange_costs.busiest_host_byte_ms * self.demand[shape, Demand.VOLUME]

    def num_columns(self, unit: int, width: int) -> int:
        """Return the columns of a piece, or of the widest table of a unit of several."""
        step = int(self.columns_per_step[unit])
        return step * width or max(self.task.tables[i].embedding_dim for i in self.tables[unit])

    def max_width(self, unit: int) -> int:
        """Return the width up to which all pieces of a unit are possible; 0 if none is."""
        possible = self.possible[self.first_shape[unit] : self.first_shape[unit + 1]]
        return len(possible) if possible.all() else int(possible.argmin())

    def slice_steps(self, unit: int, width: int) -> int:
        """Return the steps of one shard of a piece, which is all of the piece unless it is sliced.

        TorchRec trains several shards of a table on one rank only if they are equally wide.
        """
        most = width
        if self.most_steps is not None:
            most = int(self.most_steps[self.shape(unit, width)])
        return next(n for n in range(min(width, most), 0, -1) if width % n == 0)

    @property
    def replicas(self) -> Blocks | None:
        """Return the kind of row blocks that are replicas; None if there is none."""
        return next((blocks for blocks in self.blocks if blocks.is_replica), None)

    def blocks_of_group(self, group: int) -> Blocks:
        """Return the row blocks that a group holds."""
        return self.blocks[self.groups[group].kind]

    def without_margin(self) -> Problem:
        """Return the same problem with pieces at their predicted cost."""
        blocks = tuple(_without_margin(blocks) for blocks in self.blocks)
        return dataclasses.replace(_without_margin(self), blocks=blocks)

    @property
    def has_crowding(self) -> bool:
        """Return whether pieces add more to a rank with wide shards than `load` says."""
        return self.costed.compute.device.has_warps

    def crowding_load(self, demand: Floats, crowd: Floats) -> Floats | float:
        """Return [..., L], by how much loads of pieces and a crowd are larger together than apart.

        Args:
            demand, crowd: [..., D], sums over pieces; they are broadcast.
        """
        if not self.has_crowding:
            return 0.0
        crowding_ms = self.costed.compute.crowding_ms(
            demand[..., Demand.VECTOR], crowd[..., Demand.VECTOR]
        )
        return crowding_ms @ self.weights.compute

    def processing_ms(self, load: Floats) -> Floats:
        """Return the processing time [...] of loads [..., L], the work of a single rank."""
        return load[..., Load.PROCESSING].sum(axis=-1)

    def mean_processing_ms(self, cost_ms: float) -> float:
        """Return the processing time per rank in a plan of this cost with balanced volumes."""
        costs, weights = self.exchange_costs, self.weights
        total = self.demand[self.whole_shape].sum(axis=0)
        # A rank's own exchanges are part of its processing time; the rest of `even_byte_ms` is not.
        per_byte = costs.even_byte_ms - weights.exchange[Load.COST] * costs.own_byte_ms
        shared_ms = self.num_owners * costs.fixed_ms
        shared_ms += costs.shard_ms * total[Demand.NUM_SHARDS]
        return float(cost_ms - shared_ms - per_byte * total[Demand.VOLUME] / self.world_size)


WithMargin = TypeVar("WithMargin", Problem, Blocks)


def _without_margin(given: WithMargin) -> WithMargin:
    # Loads belong to a shape, demands add up on a rank; the margin is part of both.
    demand = given.demand.copy()
    demand[:, Demand.SURCHARGE] -= given.margin
    margin = np.zeros_like(given.margin)
    return dataclasses.replace(given, demand=demand, load=given.load - given.margin, margin=margin)


def by_group(values: NDArray[Number], group_size: int) -> NDArray[Number]:
    """Return values [W, ...] of ranks as [W / group_size, group_size, ...]."""
    return values.reshape(-1, group_size, *values.shape[1:])
