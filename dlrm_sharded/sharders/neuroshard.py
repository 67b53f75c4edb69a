"""NeuroShard's published search (arXiv:2305.01868, sec. 3.3), for comparison.

The outer search is a beam search over column splits. A node is a list of shards. A child of it
halves the columns of one shard, one of the largest or of the most costly. The cheapest children
form the next beam, and the best node of all steps becomes the plan. The inner search, see
`greedy_grid`, places the shards of a node.

Weaknesses of the published search are kept: a node without a placement has infinite cost, and if
all nodes are such, the first ones form the beam; there is no repair, there are at most 10 splits,
each in halves, and no row blocks; nodes that differ only in the order of splits fill the beam.

Differs: a learned cost model may replace the published nets; optimizer state counts as memory;
shards of equal cost are placed in the order of their tables; shards that are too wide for a lookup
are not placed. Shards of a table that meet on a rank become one shard of the plan, or shards of
equal widths if one would be too wide, because TorchRec trains no different widths there; the search
still predicts them one by one. Narrow tables on many ranks have plans: if the mean columns of a
rank are fewer than two of the widest shards that cannot be halved have, and the limits leave no
plan, as for 4 columns on 8 ranks, the search runs again without limits, and ranks may stay empty.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dlrm_sharded.cost.base import costs_name
from dlrm_sharded.cost.workload import Indices
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, check_count
from dlrm_sharded.plans.layouts import ColumnShards
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE
from dlrm_sharded.plans.task import GIB, MEMORY_KEYS, ShardingTask
from dlrm_sharded.plans.validation import why_too_wide
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.greedy_grid import (
    AdditiveCosts,
    Costs,
    GreedyGrid,
    Node,
    Placement,
    ShardShapes,
)

if TYPE_CHECKING:
    from dlrm_sharded.cost.published_nets import NeuroShardCostModel

log = logging.getLogger(__name__)

NAME = "neuroshard"
COSTS = LEARNED, PUBLISHED = "learned", "neuroshard"
"""Values of the key `costs`."""

MIN_LIMIT, MAX_LIMIT = 1.0, 1.5
"""Range of the limits on the columns of a rank, relative to the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class NeuroShardSharder:
    """Plans with the search of the paper; the defaults are the paper's.

    Args:
        nets: the published networks, with whose costs it searches; None for the run's cost model.
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
            self.context.costs_for(NAME)  # raises if the run has no additive cost model
        check_count("sharder.beam_width", self.beam_width, least=1)
        check_count("sharder.num_candidates", self.num_candidates, least=1)
        check_count("sharder.num_limits", self.num_limits, least=1, most=1000)
        check_count("sharder.max_splits", self.max_splits, least=0)

    @property
    def uses_costs(self) -> bool:
        """Return whether plans depend on the run's cost model."""
        return self.nets is None

    @property
    def costs(self) -> str:
        """Name of the costs with which it searches."""
        model = self.nets or self.context.cost_model
        assert model is not None
        return costs_name(model)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        if self.nets is None:
            costs: Costs = AdditiveCosts(self.context.costs_for(NAME)(task))
        else:
            costs = self.nets.costs_of(task)
        shapes = ShardShapes.from_costs(costs)
        limits = np.linspace(MIN_LIMIT, MAX_LIMIT, self.num_limits)
        best, num_nodes = self._search(shapes, GreedyGrid(costs, shapes, limits))
        if best.cost_ms == math.inf and shapes.are_wide_for(task):
            best, _ = self._search(shapes, GreedyGrid(costs, shapes, np.array([math.inf])))
        if best.cost_ms == math.inf:
            raise _none_found(task, num_nodes, self.max_splits)
        return ShardingPlan(task.topology.world_size, _merged(task, shapes, best))

    def _search(self, shapes: ShardShapes, inner: GreedyGrid) -> tuple[Placement, int]:
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

    def _children(self, node: Node, shapes: ShardShapes) -> Iterator[Node]:
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
            the networks if they are the run's cost model, else for the cost model.
        options: the other arguments of `NeuroShardSharder`.
    """
    if costs not in (None, *COSTS):
        raise ConfigError(f"sharder.costs is {costs!r}; known: {', '.join(COSTS)}")
    _say_what_it_is()
    model = context.cost_model
    has_nets = model is not None and costs_name(model) == PUBLISHED
    if costs == LEARNED or (costs is None and not has_nets):
        return NeuroShardSharder(context, **options)
    from dlrm_sharded.cost.published_nets import NeuroShardCostModel, neuroshard_cost_model  # torch

    nets = model if isinstance(model, NeuroShardCostModel) else neuroshard_cost_model(context.run)
    return NeuroShardSharder(context, nets=nets, **options)


@functools.cache
def _say_what_it_is() -> None:
    """Log, once in a process, that the name belonged to this project's own search in 0.2."""
    log.info("since 0.3, sharder=neuroshard is the published method; 0.2's is sharder=search")


def candidates(node: Node, size_bytes: Indices, num_candidates: int) -> list[int]:
    """Return the indices of a node's largest shards and of its most costly ones, ascending.

    Some of them may be too narrow to be halved.
    """
    by_size = np.argsort(-size_bytes[list(node)], kind="stable")
    by_cost = np.argsort(node, kind="stable")  # shapes are numbered by descending cost
    return np.union1d(by_size[:num_candidates], by_cost[:num_candidates]).tolist()


def _merged(task: ShardingTask, shapes: ShardShapes, placed: Placement) -> tuple[Shard, ...]:
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
    widths = range(min(num_cols, max_cols - max_cols % COLUMN_MULTIPLE), 0, -COLUMN_MULTIPLE)
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
        f"most; use sharder=search, or add ranks or memory ({MEMORY_KEYS})"
    )
