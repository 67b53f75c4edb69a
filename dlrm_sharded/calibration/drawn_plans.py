"""The plans that are drawn and measured, one after another, as long as there is time.

Every third plan is of exchanges between ranks, whose tables are tiny. The others are of lookups, in
rounds with one plan of each kind. Each kind shows other parts of a time: ranks with few shards and
many ids show the work per id, ranks with many small shards the work per shard, wide and narrow
shards the work per row and column, tiny ones launches, and row blocks and replicas their lookups.
A first run draws them from its own tables, and random plans among them, so that costs also hold for
other tables. Without a run's tables, all plans are random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.accesses.patterns import (
    AccessPattern,
    ReuseBinAccesses,
    UniformAccesses,
    ZipfAccesses,
    draw_accesses,
)
from dlrm_sharded.calibration.plan_limits import PlanLimits, within_limits
from dlrm_sharded.calibration.random_plans import draw_communication, draw_computation
from dlrm_sharded.calibration.samples import COMMUNICATION, COMPUTATION
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

EXCHANGE_EVERY = 3
"""The last of every `EXCHANGE_EVERY` plans is of exchanges."""

LOOKUPS = ("task", "few", "many", "wide", "narrow", "hot", "uniform", "tiny")
LOOKUPS_ON_ALL_RANKS = ("row blocks", "replicas")
GENERAL = "general"
"""Names of plans of lookups: with a run's tables, also with some on all ranks, and random ones."""

OWN_ACCESSES = ("task", "few", "wide")
"""Plans whose tables have the accesses that were measured on them, if any were."""

HOT_EXPONENT = 1.2
SMALL_ROWS, SMALL_POOLING = 20_000, 4.0
"""Largest rows and ids per sample of small shards."""

NARROW_COLUMNS = 16
REPLICA_ROWS = 5_000

NUM_SHARDS = {"few": (1, 3), "many": (16, 49)}
DEFAULT_NUM_SHARDS = (1, 9)
"""Range of a rank's number of shards, without its end."""

BAGS, SEQUENCES = "", "sequences"
"""Modules of drawn tables: TorchRec has one for bags, and another one for sequences."""


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """A plan to measure.

    Args:
        kind: `COMMUNICATION` for plans of exchanges, else `COMPUTATION`, see `Sample`.
        batch_size: global batch, a multiple of `world_size`.
    """

    kind: str
    world_size: int
    batch_size: int
    tables: tuple[DrawnTable, ...]

    def as_plan(self, device: str, ranks_per_host: int) -> tuple[ShardingPlan, ShardingTask]:
        """Return the plan, and its task, whose tables have their expected profiles.

        Args:
            device: "cpu" or "cuda".
            ranks_per_host: ranks of a host of the job.
        """
        tables = tuple(
            _profiled(f"t{i}", drawn, self.batch_size) for i, drawn in enumerate(self.tables)
        )
        shards = [
            shard
            for table, drawn in zip(tables, self.tables, strict=True)
            for shard in _shards(table, drawn, self.world_size)
        ]
        topology = Topology(
            self.world_size,
            memory_bytes=1,
            local_world_size=min(ranks_per_host, self.world_size),
            compute_device=device,
        )
        plan = ShardingPlan(self.world_size, tuple(shards))
        return plan, ShardingTask(tables, topology, self.batch_size)


def draw_plan(
    number: int,
    rng: np.random.Generator,
    limits: PlanLimits,
    *,
    batch_sizes: Sequence[int],
    computing: int,
    exchanging: Sequence[int],
    tables: Sequence[Table] = (),
) -> DrawnPlan:
    """Draw the plan with a number, which decides its kind.

    Args:
        batch_sizes: global batch sizes; one is drawn and rounded down to a multiple of the ranks.
        computing: number of ranks that measure computation at once.
        exchanging: numbers of ranks that exchange, in turn; none for no exchanges.
        tables: tables of a run, from which most plans are drawn; none for random plans only.
    """
    turn, place = divmod(number, EXCHANGE_EVERY)
    is_exchange = bool(exchanging) and place == EXCHANGE_EVERY - 1
    world_size = exchanging[turn % len(exchanging)] if is_exchange else computing
    batch_size = int(rng.choice(np.asarray(batch_sizes)))
    batch_size = max(batch_size - batch_size % world_size, world_size)
    if is_exchange:
        kind = COMMUNICATION
        drawn = draw_communication(rng, world_size=world_size, batch_size=batch_size, limits=limits)
    else:
        kind = COMPUTATION
        names = _names(limits, computing) if tables else (GENERAL,)
        name = names[(number - turn if exchanging else number) % len(names)]
        if name == GENERAL:
            drawn = draw_computation(
                rng, world_size=world_size, batch_size=batch_size, limits=limits
            )
        else:
            of_run = _of_tables(name, tables, world_size, rng)
            drawn = within_limits(limits, of_run, world_size, batch_size)
    return DrawnPlan(kind, world_size, batch_size, tuple(drawn))


def _names(limits: PlanLimits, computing: int) -> tuple[str, ...]:
    on_all_ranks = LOOKUPS_ON_ALL_RANKS[: 1 + limits.replicas] if computing > 1 else ()
    return *LOOKUPS, *on_all_ranks, GENERAL


def _of_tables(
    name: str, tables: Sequence[Table], num_ranks: int, rng: np.random.Generator
) -> list[DrawnTable]:
    """Draw a named plan of lookups, whose ranks have different tables of the run."""
    drawn = [table for rank in range(num_ranks) for table in _of_rank(name, tables, rank, rng)]
    if name in LOOKUPS_ON_ALL_RANKS:
        replicated = name == "replicas"
        for table in _some(tables, int(rng.integers(1, 4)), rng):
            rows = table.num_embeddings
            drawn.append(
                dataclasses.replace(
                    _as_drawn(table, draw_accesses(rng, 0.5), None),
                    num_rows=min(rows, REPLICA_ROWS) if replicated else max(rows, num_ranks),
                    replicated=replicated,
                    # FBGEMM's lookup of replicas pools on CPUs
                    pooled=table.pooled or replicated,
                )
            )
    # all sequences have the width of the first, because they share a module in a measured plan
    width = next((table.num_cols for table in drawn if not table.pooled), None)
    return [
        table if table.pooled or width is None else dataclasses.replace(table, num_cols=width)
        for table in drawn
    ]


def _of_rank(
    name: str, tables: Sequence[Table], rank: int, rng: np.random.Generator
) -> list[DrawnTable]:
    """Draw the shards that a rank has by itself."""
    if name == "tiny":
        return [DrawnTable(100, COLUMN_MULTIPLE, 0.5, ZipfAccesses(0.0), rank)]
    if name == "few":
        by_ids = sorted(tables, key=lambda table: -table.pooling_factor)
        tables = by_ids[: max(len(tables) // 4, 1)]
    if name == "wide":
        widest = max(table.embedding_dim for table in tables)
        tables = [table for table in tables if table.embedding_dim == widest]
    num = int(rng.integers(*NUM_SHARDS.get(name, DEFAULT_NUM_SHARDS)))
    shards = []
    for table in _some(tables, num, rng):
        shard = _as_drawn(table, _accesses(name, table, rng), rank)
        if name == "many":
            shard = dataclasses.replace(
                shard,
                num_rows=min(shard.num_rows, SMALL_ROWS),
                pooling_factor=min(shard.pooling_factor, SMALL_POOLING),
            )
        if name == "narrow":
            cols = int(rng.integers(1, NARROW_COLUMNS // COLUMN_MULTIPLE + 1)) * COLUMN_MULTIPLE
            shard = dataclasses.replace(shard, num_cols=min(cols, shard.num_cols))
        shards.append(shard)
    return shards


def _accesses(name: str, table: Table, rng: np.random.Generator) -> AccessPattern:
    histogram = table.reuse_histogram
    if name in OWN_ACCESSES and histogram is not None and any(histogram):
        return ReuseBinAccesses.of_histogram(histogram)
    if name == "hot":
        return ZipfAccesses(HOT_EXPONENT)
    return UniformAccesses() if name == "uniform" else draw_accesses(rng, 0.5)


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


def _profiled(name: str, drawn: DrawnTable, batch_size: int) -> Table:
    """Return a drawn table with the reuse histogram that its accesses have on average."""
    num_ids = batch_size * drawn.pooling_factor
    distribution = drawn.accesses.distribution(drawn.num_rows, num_ids)
    return Table(
        name,
        drawn.num_rows,
        drawn.num_cols,
        drawn.pooling_factor,
        distribution.expected_reuse_histogram(num_ids),
        pooled=drawn.pooled,
        module=BAGS if drawn.pooled else SEQUENCES,
    )


def _shards(table: Table, drawn: DrawnTable, world_size: int) -> list[Shard]:
    if drawn.rank is not None:
        return [Shard.whole(table, drawn.rank)]
    layout = Replicas(world_size) if drawn.replicated else RowBlocks(range(world_size))
    return layout.shards(table)
