"""NeuroShard's published search (arXiv:2305.01868, sec. 3.3), for comparison.

The outer search is a beam search over column splits. A node is a list of shards. A child of it
halves the columns of one shard, one of the largest or of the most costly. The cheapest children
form the next beam, and the best node of all steps becomes the plan. The inner search places the
shards of a node for several limits on the columns of a rank: in descending order of predicted cost,
each shard goes to the rank with the least computation so far that has memory and columns left. The
placement with the least predicted cost, exchanges included, belongs to the node.

Weaknesses of the published search are kept: a node without a placement has infinite cost, and if
all nodes have, the first ones form the beam; there is no repair, there are at most 10 splits, each
in halves, and no row blocks; nodes that differ only in the order of splits fill the beam.

Differs: a learned cost model may replace the published nets; optimizer state counts as memory;
shards of equal cost are placed in the order of their tables; shards that are too wide for a lookup
are not placed. Shards of a table that meet on a rank become one shard of the plan, or shards of
equal widths if one would be too wide, as TorchRec trains no different widths there, although the
search prices them separately. Narrow tables on many ranks have plans: where the mean columns of a
rank are less than two of the widest shards that cannot be halved, and the limits leave no plan, as
for 4 columns on 8 ranks, the search runs once more without limits, and ranks may stay empty.

Letters: K shapes, V numbers of a shape, N nodes, S shards of a node, L limits, W ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import PricedTask, costs_name
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.shapes import PiecePricer
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, check_count
from dlrm_sharded.plans.layouts import ColumnShards, trained_layouts
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, MEMORY_KEYS, ShardingTask, Topology
from dlrm_sharded.plans.validation import why_too_wide
from dlrm_sharded.sharders.base import SharderContext

if TYPE_CHECKING:
    from dlrm_sharded.cost.neuroshard import NeuroShardCostModel

log = logging.getLogger(__name__)

NAME = "neuroshard"
COSTS = LEARNED, PUBLISHED = "learned", "neuroshard"
"""Values of the key `costs`."""

MIN_LIMIT, MAX_LIMIT = 1.0, 1.5
"""Range of the limits on the columns of a rank, relative to the mean."""

Indices = NDArray[np.int64]
Node = tuple[int, ...]
"""Shape of every shard; a split puts one half in place of the shard and the other at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class NeuroShardSharder:
    """Plans with the search of the paper; the defaults are the paper's.

    Args:
        nets: the published networks, by which it searches; None for the run's cost model.
        beam_width: number of nodes that are kept in every step.
        num_candidates: number of largest shards, and of most costly ones, that are tried for a
            split.
        num_limits: number of limits on the columns of a rank, evenly from 1.0 to 1.5 x the mean.
        max_splits: number of steps.
    """

    name: ClassVar[str] = NAME

    context: SharderContext
    _: KW_ONLY
    nets: NeuroShardCostModel | None = None
    beam_width: int = 3
    num_candidates: int = 10
    num_limits: int = 11
    max_splits: int = 10

    def __post_init__(self) -> None:
        if self.nets is None:
            self.context.pricing_for(NAME)  # which refuses a run without unit costs
        check_count("sharder.beam_width", self.beam_width, least=1)
        check_count("sharder.num_candidates", self.num_candidates, least=1)
        check_count("sharder.num_limits", self.num_limits, least=1, most=1000)
        check_count("sharder.max_splits", self.max_splits, least=0)

    @property
    def uses_costs(self) -> bool:
        """Tell whether plans depend on the run's cost model."""
        return self.nets is None

    @property
    def costs(self) -> str:
        """Name of the costs that it searches by."""
        model = self.nets or self.context.cost_model
        assert model is not None
        return costs_name(model)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        if self.nets is None:
            costs: _Costs = _PricedCosts(self.context.pricing_for(NAME)(task))
        else:
            costs = self.nets.costs_of(task)
        shapes = _Shapes.from_costs(costs)
        limits = np.linspace(MIN_LIMIT, MAX_LIMIT, self.num_limits)
        best, num_nodes = self._search(shapes, _GreedyGrid(costs, shapes, limits))
        if best.cost_ms == math.inf and shapes.are_wide_for(task):
            best, _ = self._search(shapes, _GreedyGrid(costs, shapes, np.array([math.inf])))
        if best.cost_ms == math.inf:
            raise _none_found(task, num_nodes, self.max_splits)
        return ShardingPlan(task.topology.world_size, _merged(task, shapes, best))

    def _search(self, shapes: _Shapes, inner: _GreedyGrid) -> tuple[_Placement, int]:
        """Return the best placement, and the number of nodes that were placed."""
        beam = [shapes.whole]
        [best] = inner.place(beam)
        num_nodes = 1
        for _ in range(self.max_splits):
            nodes = [child for node in beam for child in self._children(node, shapes)]
            if not nodes:
                break
            placed = inner.place(nodes)
            num_nodes += len(nodes)
            best = min(best, *placed, key=lambda placement: placement.cost_ms)
            cheapest = sorted(range(len(nodes)), key=lambda i: placed[i].cost_ms)
            beam = [nodes[i] for i in cheapest[: self.beam_width]]
        return best, num_nodes

    def _children(self, node: Node, shapes: _Shapes) -> Iterator[Node]:
        """Yield a child for each candidate that can be halved, in the order of the shards."""
        for i in candidates(node, shapes.size_bytes, self.num_candidates):
            half = shapes.half.get(node[i])
            if half is not None:
                yield (*node[:i], half, *node[i + 1 :], half)


def published_sharder(
    context: SharderContext, *, costs: str | None = None, **options: Any
) -> NeuroShardSharder:
    """Build the sharder from the keys of conf/sharder/neuroshard.yaml.

    Args:
        costs: "neuroshard" for the published networks, "learned" for the run's cost model; None for
            the cost model, or for the networks where these are the run's cost model.
        options: the other arguments of `NeuroShardSharder`.
    """
    if costs not in (None, *COSTS):
        raise ConfigError(f"sharder.costs is {costs!r}; known: {', '.join(COSTS)}")
    _say_what_it_is()
    model = context.cost_model
    is_of_nets = model is not None and costs_name(model) == PUBLISHED
    if costs == LEARNED or (costs is None and not is_of_nets):
        return NeuroShardSharder(context, **options)
    from dlrm_sharded.cost.neuroshard import NeuroShardCostModel, neuroshard_cost_model  # torch

    nets = model if isinstance(model, NeuroShardCostModel) else neuroshard_cost_model(context.run)
    return NeuroShardSharder(context, nets=nets, **options)


@functools.cache
def _say_what_it_is() -> None:
    """Log, once in a process, that the name belonged to our search in 0.2."""
    log.info("sharder=neuroshard is the published method since 0.3; ours is `search`")


class _Costs(Protocol):
    """Costs of a task's shards and ranks."""

    @property
    def task(self) -> ShardingTask:
        """The task, whose tables have access profiles if the costs depend on these."""

    def vectors(self, table: Indices, num_cols: Indices) -> Floats:
        """Return [S, V], the vector of each shard, for some columns of tables, each [S]."""

    def compute_ms(self, sums: Floats) -> Floats:
        """Return [K], computation in both directions of ranks with sums of vectors [K, V]."""

    def exchanges_ms(self, num_cols: Floats, num_shards: Floats) -> Iterator[Floats]:
        """Yield [N, W], exchanges of ranks with columns and shards, each [N, W]."""


class _PricedCosts:
    """Costs of an additive cost model."""

    def __init__(self, priced: PricedTask) -> None:
        self.task = priced.task
        self._pricer = PiecePricer(priced.task, priced.compute)
        self._compute, self._communication = priced.compute, priced.communication
        self._hosts = priced.hosts
        self._col_bytes = FLOAT_BYTES * self.task.batch_size / self.task.topology.world_size

    def vectors(self, table: Indices, num_cols: Indices) -> Floats:
        return self._pricer.columns(table, num_cols).vectors

    def compute_ms(self, sums: Floats) -> Floats:
        times: Floats = self._compute.times_ms(sums, np.ones(len(sums))).sum(axis=1)
        return times

    def exchanges_ms(self, num_cols: Floats, num_shards: Floats) -> Iterator[Floats]:
        volume = num_cols * self._col_bytes
        for kind in STEP_EXCHANGES:
            yield self._communication.all_to_all_ms(kind, volume, num_shards, self._hosts)


def candidates(node: Node, size_bytes: Indices, num_candidates: int) -> list[int]:
    """Return the indices of a node's largest shards and of its most costly ones, ascending.

    Some of them may be too narrow to be halved.
    """
    by_size = np.argsort(-size_bytes[list(node)], kind="stable")
    by_cost = np.argsort(node, kind="stable")  # shapes are numbered by descending cost
    return np.union1d(by_size[:num_candidates], by_cost[:num_candidates]).tolist()


@dataclass(frozen=True, slots=True)
class _Shapes:
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
    def from_costs(cls, costs: _Costs) -> _Shapes:
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
        """Return whether two of the widest shards that cannot be halved exceed a rank's mean."""
        widest = max(
            cols for shape, cols in enumerate(self.num_cols.tolist()) if shape not in self.half
        )
        total = sum(table.embedding_dim for table in task.tables)
        return total < 2 * widest * task.topology.world_size


@dataclass(frozen=True, slots=True)
class _Placement:
    """The rank of every shard of a node; the cost is infinite if no placement was found."""

    cost_ms: float
    shapes: Indices
    ranks: Indices


class _GreedyGrid:
    """The inner search, vectorized over nodes and limits, whose placements are independent."""

    def __init__(self, costs: _Costs, shapes: _Shapes, limits: Floats) -> None:
        task = costs.task
        self._costs = costs
        self._shapes = shapes
        total = sum(table.embedding_dim for table in task.tables)
        self._max_cols = limits * (total / task.topology.world_size)
        self._max_shard_cols = task.topology.max_shard_columns
        self._max_bytes = np.array(task.topology.rank_memory_bytes)

    def place(self, nodes: Sequence[Node]) -> list[_Placement]:
        """Return the best placement of each node; all nodes have the same number of shards.

        Nodes that differ only in the order of their shards have the same placement.
        """
        # shapes are numbered by descending cost, so sorted nodes are in the order of placement
        in_order = [tuple(sorted(node)) for node in nodes]
        distinct = list(dict.fromkeys(in_order))
        placed = dict(zip(distinct, self._place(np.array(distinct)), strict=True))
        return [placed[node] for node in in_order]

    def _place(self, nodes: Indices) -> Iterator[_Placement]:
        """Yield the placements of nodes [N, S], whose shards are in the order of placement."""
        shapes = self._shapes
        num_nodes, num_shards = nodes.shape
        runs = (num_nodes, len(self._max_cols))
        # one greedy run for each node and limit, [N, L]; its ranks are the next axis
        by_rank = (*runs, len(self._max_bytes))
        sums = np.zeros((*by_rank, shapes.vectors.shape[1]))
        used = np.zeros(by_rank, dtype=np.int64)
        cols, count, rank_ms = np.zeros(by_rank), np.zeros(by_rank), np.zeros(by_rank)
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
            count[(*run, rank)] += 1
            rank_ms[(*run, rank)] = self._compute_ms(sums[(*run, rank)])
        costs = np.where(found, self._costs_ms(rank_ms, cols, count), np.inf)
        for limit_costs, limit_ranks, node in zip(costs, ranks, nodes, strict=True):
            best = int(limit_costs.argmin())
            yield _Placement(float(limit_costs[best]), node, limit_ranks[best])

    def _compute_ms(self, sums: Floats) -> Floats:
        """Return [...], computation in both directions of ranks with sums [..., V]."""
        flat = sums.reshape(-1, sums.shape[-1])
        return self._costs.compute_ms(flat).reshape(sums.shape[:-1])

    def _costs_ms(self, rank_ms: Floats, cols: Floats, count: Floats) -> Floats:
        """Return [N, L], `PlanCost.cost_ms` from computation, columns and shards, all [N, L, W]."""
        totals = rank_ms.copy()
        num_ranks = totals.shape[-1]
        num_cols, num_shards = cols.reshape(-1, num_ranks), count.reshape(-1, num_ranks)
        for times in self._costs.exchanges_ms(num_cols, num_shards):
            totals += times.reshape(totals.shape)
        return totals.max(axis=-1)


def _size_bytes(task: ShardingTask, table: int, num_cols: int) -> int:
    """Return the memory of some columns of a table, given by its number in the task."""
    whole = task.tables[table]
    return task.topology.table_bytes(dataclasses.replace(whole, embedding_dim=num_cols))


def _widths(table: Table, topology: Topology) -> Iterator[int]:
    """Yield a table's columns, half of them, a quarter, ..., as long as they are multiples of 4.

    Where columns may not be split, all columns are the only width.
    """
    num_cols = table.embedding_dim
    yield num_cols
    while num_cols % (2 * COLUMN_MULTIPLE) == 0 and "columns" in trained_layouts(table, topology):
        num_cols //= 2
        yield num_cols


def _merged(task: ShardingTask, shapes: _Shapes, placed: _Placement) -> tuple[Shard, ...]:
    """Merge the shards of a table on the same rank, and lay all of them side by side."""
    cols: list[Counter[int]] = [Counter() for _ in task.tables]
    for shape, rank in zip(placed.shapes.tolist(), placed.ranks.tolist(), strict=True):
        cols[shapes.table[shape]][rank] += int(shapes.num_cols[shape])
    shards: list[Shard] = []
    for table, cols_by_rank in zip(task.tables, cols, strict=True):
        widths = [
            (rank, width)
            for rank, num_cols in sorted(cols_by_rank.items())
            for width in _equal_parts(num_cols, task.topology.max_shard_columns)
        ]
        shards += ColumnShards.shards(table, widths)
    return tuple(shards)


def _equal_parts(num_cols: int, max_cols: int) -> list[int]:
    """Return the widths of the fewest equal parts of these columns that are not too wide."""
    widths = range(min(num_cols, max_cols), 0, -COLUMN_MULTIPLE)
    width = next(width for width in widths if num_cols % width == 0)
    return [width] * (num_cols // width)


def _none_found(task: ShardingTask, num_nodes: int, max_splits: int) -> InfeasibleTaskError:
    if reason := why_too_wide(task):
        return InfeasibleTaskError(reason)
    topology = task.topology
    largest = max(task.tables, key=topology.table_bytes)
    widest = max(task.tables, key=lambda table: table.embedding_dim)
    return InfeasibleTaskError(
        f"the search of the NeuroShard paper found no plan, though there may be one; it tried "
        f"{num_nodes:,} choices of at most {max_splits} column splits; tables of "
        f"{task.table_bytes / GIB:.2f} GiB, the largest {largest.name!r} with "
        f"{topology.table_bytes(largest):,} B and the widest {widest.name!r} with "
        f"{widest.embedding_dim:,} columns, on {topology.world_size} ranks of "
        f"{topology.rank_memory_text}, with {topology.max_shard_columns:,} columns of a shard at "
        f"most; use sharder=search, or add ranks or memory "
        f"({MEMORY_KEYS})"
    )
