"""Made-up plans of a run's own tables, from which a first start chooses what it measures.

Each kind of plan tells of other parts of a time: ranks with few shards and many ids of the work for
ids, ranks with many small shards of the work for shards, wide and narrow ones of rows and columns,
tiny ones of launches, row blocks and replicas of their own lookups, and tiny tables on all ranks of
exchanges. Plans of a collection are among them, so that prices also hold for other tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.accesses.patterns import (
    AccessPattern,
    ReuseBinAccesses,
    UniformAccesses,
    ZipfAccesses,
    draw_accesses,
)
from dlrm_sharded.calibration.drawn_plans import plan_of_drawn
from dlrm_sharded.calibration.random_plans import (
    MAX_COLS,
    RankLimits,
    draw_communication,
    draw_computation,
    within_limits,
)
from dlrm_sharded.cost.communication import Hosts
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import Topology

PLANS_OF_A_KIND = 4
"""Plans that are drawn of each kind, half of them with a smaller batch."""

NUM_EXCHANGES = 12
"""Plans of exchanges that are drawn."""

SMALLER_BATCH = 4
"""Divisor of the run's batch for every other plan."""

OWN_ACCESSES = ("task", "few", "wide")
"""Kinds of ranks whose tables have the accesses that were measured on them, if any were."""

HOT_EXPONENT = 1.2
SMALL_ROWS, SMALL_POOLING = 20_000, 4.0
"""Largest rows and ids per sample of small shards."""

NARROW_COLUMNS = 16
REPLICA_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class StartPlan:
    """A made-up plan.

    Args:
        kind: "communication" for plans of exchanges, else "computation", as in a collection.
        name: kind of its ranks, for logs and tests.
        batch_size: global batch, a multiple of `world_size`.
    """

    kind: str
    name: str
    number: int
    world_size: int
    batch_size: int
    tables: tuple[DrawnTable, ...]

    def shapes(self, device: str, ranks_per_host: int) -> tuple[Workload, Hosts]:
        """Return the shards in the form that cost models predict, and how ranks lie on hosts."""
        per_host = min(self.world_size, ranks_per_host)
        topology = Topology(
            self.world_size, memory_bytes=1, local_world_size=per_host, compute_device=device
        )
        plan, task = plan_of_drawn(self.tables, self.batch_size, topology)
        return workload_of_plan(plan, task), Hosts(self.world_size, per_host)


def start_plans(
    tables: Sequence[Table],
    batch_size: int,
    limits: RankLimits,
    *,
    computing: int,
    exchanging: int,
    seed: int = 0,
) -> list[StartPlan]:
    """Draw the plans that a first start chooses from.

    Args:
        tables: those of the run.
        batch_size: global batch of the run.
        computing: ranks that measure computation at once.
        exchanging: ranks that exchange; plans of exchanges are drawn for more than one.
    """
    limits = dataclasses.replace(limits, wide_cols=MAX_COLS)  # wide are the tables of the run alone
    rng = np.random.default_rng(seed)
    plans: list[StartPlan] = []

    def add(kind: str, name: str, size: int, batch: int, drawn: list[DrawnTable]) -> None:
        within = tuple(within_limits(limits, drawn, size, batch))
        plans.append(StartPlan(kind, name, len(plans), size, batch, within))

    for turn in range(PLANS_OF_A_KIND):
        batch = _shared(batch_size // (SMALLER_BATCH if turn % 2 else 1), computing)
        for name in _kinds(computing, limits):
            add("computation", name, computing, batch, _drawn(name, tables, computing, rng))
        general = draw_computation(rng, world_size=computing, batch_size=batch, limits=limits)
        add("computation", "general", computing, batch, general)
    for _ in range(NUM_EXCHANGES if exchanging > 1 else 0):
        batch = _shared(batch_size, exchanging)
        drawn = draw_communication(rng, world_size=exchanging, batch_size=batch, limits=limits)
        add("communication", "exchange", exchanging, batch, drawn)
    return plans


def _shared(batch_size: int, num_ranks: int) -> int:
    """Round a batch down so that the ranks share it equally."""
    return max(batch_size - batch_size % num_ranks, num_ranks)


def _kinds(computing: int, limits: RankLimits) -> Iterator[str]:
    yield from ("task", "few", "many", "wide", "narrow", "hot", "uniform", "tiny")
    if computing > 1:
        yield "row blocks"
        if limits.replicas:
            yield "replicas"


def _drawn(
    name: str, tables: Sequence[Table], num_ranks: int, rng: np.random.Generator
) -> list[DrawnTable]:
    """Draw a plan of a kind, whose ranks have different tables of the run."""
    drawn = [table for rank in range(num_ranks) for table in _of_rank(name, tables, rank, rng)]
    if name in ("row blocks", "replicas"):
        for table in _some(tables, int(rng.integers(1, 4)), rng):
            rows = min(table.num_embeddings, REPLICA_ROWS)
            rows = rows if name == "replicas" else max(table.num_embeddings, num_ranks)
            drawn.append(
                dataclasses.replace(
                    _as_drawn(table, draw_accesses(rng, 0.5), None),
                    num_rows=rows,
                    replicated=name == "replicas",
                    # FBGEMM's lookup of replicas pools on CPUs
                    pooled=table.pooled or name == "replicas",
                )
            )
    return _with_equal_sequences(drawn)


def _with_equal_sequences(drawn: Sequence[DrawnTable]) -> list[DrawnTable]:
    """Give all sequences the width of the first, as they are of one module in a measured plan."""
    width = next((table.num_cols for table in drawn if not table.pooled), None)
    return [
        table if table.pooled or width is None else dataclasses.replace(table, num_cols=width)
        for table in drawn
    ]


def _of_rank(
    name: str, tables: Sequence[Table], rank: int, rng: np.random.Generator
) -> Iterator[DrawnTable]:
    """Yield the shards that a rank has by itself."""
    if name == "tiny":
        yield DrawnTable(100, COLUMN_MULTIPLE, 0.5, ZipfAccesses(0.0), rank)
        return
    if name == "few":
        by_ids = sorted(tables, key=lambda table: -table.pooling_factor)
        tables = by_ids[: max(len(tables) // 4, 1)]
    if name == "wide":
        widest = max(table.embedding_dim for table in tables)
        tables = [table for table in tables if table.embedding_dim == widest]
    num = int(
        rng.integers(16, 49) if name == "many" else rng.integers(1, 3 if name == "few" else 9)
    )
    for table in _some(tables, num, rng):
        accesses = draw_accesses(rng, 0.5)
        histogram = table.reuse_histogram
        if name in OWN_ACCESSES and histogram is not None and any(histogram):
            accesses = ReuseBinAccesses.of_histogram(histogram)
        if name == "hot":
            accesses = ZipfAccesses(HOT_EXPONENT)
        if name == "uniform":
            accesses = UniformAccesses()
        drawn = _as_drawn(table, accesses, rank)
        if name == "many":
            rows = min(drawn.num_rows, SMALL_ROWS)
            pooling = min(drawn.pooling_factor, SMALL_POOLING)
            drawn = dataclasses.replace(drawn, num_rows=rows, pooling_factor=pooling)
        if name == "narrow":
            cols = int(rng.integers(1, NARROW_COLUMNS // COLUMN_MULTIPLE + 1)) * COLUMN_MULTIPLE
            drawn = dataclasses.replace(drawn, num_cols=min(cols, drawn.num_cols))
        yield drawn


def _some(tables: Sequence[Table], num: int, rng: np.random.Generator) -> list[Table]:
    return [tables[i] for i in rng.integers(len(tables), size=num)]


def _as_drawn(table: Table, accesses: AccessPattern, rank: int | None) -> DrawnTable:
    return DrawnTable(
        table.num_embeddings,
        table.embedding_dim,
        table.pooling_factor,
        accesses,
        rank,
        pooled=table.pooled,
    )
