"""Random plans of random tasks, for properties of cost models."""

import math

from hypothesis import strategies as st

from dlrm_sharded import Shard, ShardingPlan, ShardingTask, Topology
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from tests.unit.synthetic import column_shards

COMPUTING, EXCHANGING = (STAGES[0], STAGES[3]), STAGES[1:3]
Planned = tuple[ShardingPlan, ShardingTask]


@st.composite
def histograms(draw: st.DrawFn) -> tuple[float, ...]:
    """Ids of one or two bins."""
    bins = st.integers(0, NUM_REUSE_BINS - 1)
    one, other, share = draw(st.tuples(bins, bins, st.floats(0, 1)))
    return tuple(share * (i == one) + (1 - share) * (i == other) for i in range(NUM_REUSE_BINS))


@st.composite
def tables(draw: st.DrawFn, name: str) -> Table:
    """Bags of one or two modules, and sequences, of which a module has one width."""
    pooled, embedding_dim = True, 4 * draw(st.integers(1, 100))
    module = draw(st.sampled_from(["", "", "", "a", "of_ids"]))
    if module == "of_ids":
        pooled, embedding_dim = False, draw(st.sampled_from([16, 64]))
        module += str(embedding_dim)
    return Table(
        name,
        num_embeddings=round(10 ** draw(st.floats(0, 8))),
        embedding_dim=embedding_dim,
        pooling_factor=draw(st.floats(0, 200)),
        reuse_histogram=draw(histograms()),
        num_features=draw(st.sampled_from([1, 1, 3])),
        pooled=pooled,
        module=module,
    )


@st.composite
def topologies(draw: st.DrawFn, *, max_hosts: int = 3) -> Topology:
    per_host = draw(st.sampled_from([1, 2, 3, 4]))
    return Topology(per_host * draw(st.integers(1, max_hosts)), 10**15, per_host)


@st.composite
def planned(draw: st.DrawFn, *, max_hosts: int = 3, layouts: tuple[str, ...] = ()) -> Planned:
    """A plan with every kind of shard, or of some of the layouts."""
    topology = draw(topologies(max_hosts=max_hosts))
    layouts = layouts or ("whole", "columns", "rows", "rows_of_host", "replicas")
    task_tables = tuple(draw(tables(f"t{i}")) for i in range(draw(st.integers(1, 8))))
    shards: list[Shard] = []
    for table in task_tables:
        shards += draw(shards_of(table, topology, layouts))
    task = ShardingTask(task_tables, topology, draw(st.sampled_from([64, 1024, 8192])))
    return ShardingPlan(topology.world_size, tuple(shards)), task


@st.composite
def shards_of(
    draw: st.DrawFn, table: Table, topology: Topology, layouts: tuple[str, ...]
) -> list[Shard]:
    layout = draw(st.sampled_from(layouts))
    first, second = draw(st.tuples(*[st.integers(0, topology.world_size - 1)] * 2))
    if not table.pooled and layout in ("columns", "rows_of_host"):
        layout = "rows" if "rows" in layouts else "whole"
    if layout == "columns" and table.embedding_dim > 4 and first != second:
        edge = 4 * draw(st.integers(1, table.embedding_dim // 4 - 1))
        return column_shards(table, (first, edge), (second, table.embedding_dim - edge))
    if layout == "replicas":
        return Replicas(topology.world_size).shards(table)
    ranks = range(topology.world_size)
    if layout == "rows_of_host":
        start = first - first % topology.ranks_per_host
        ranks = range(start, start + topology.ranks_per_host)
    if layout.startswith("rows") and RowBlocks(ranks).is_possible(table):
        return RowBlocks(ranks).shards(table)
    return [Shard.whole(table, first)]


@st.composite
def relabellings(draw: st.DrawFn, topology: Topology) -> list[int]:
    """New ranks: whole hosts change places, and ranks do within them."""
    per_host = topology.ranks_per_host
    new_rank = []
    for host in draw(st.permutations(range(topology.world_size // per_host))):
        local_ranks = draw(st.permutations(range(per_host)))
        new_rank += [host * per_host + local_rank for local_rank in local_ranks]
    return new_rank


def times_ms(cost: PlanCost, stages: tuple[str, ...] = STAGES) -> list[list[float]]:
    """By stage and rank."""
    return [[rank.stage_ms(stage) for rank in cost.per_rank] for stage in stages]


def none_lower(after: PlanCost, before: PlanCost) -> bool:
    """Whether no rank computes for less long, but for rounding."""
    return all(
        a >= b * (1 - 1e-12)
        for of_stage in zip(times_ms(after, COMPUTING), times_ms(before, COMPUTING), strict=True)
        for a, b in zip(*of_stage, strict=True)
    )


def are_times(cost: PlanCost) -> bool:
    return all(time >= 0 and math.isfinite(time) for row in times_ms(cost) for time in row)
