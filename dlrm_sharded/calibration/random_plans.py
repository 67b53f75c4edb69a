"""Random tables on ranks, which cover the range of real ones: of lookups, and of exchanges.

Table features are drawn as NeuroShard (arXiv:2305.01868, sec. 3.1) augments its tables, over wider
ranges: every width that a column split can leave, rows and pooling factors on a log scale, Zipf
exponents from 0 to beyond those of Criteo and Meta's dlrm_datasets (about 0.9). Real accesses are
not Zipf-distributed, so some of the tables have another of the patterns in `accesses.patterns`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dlrm_sharded.accesses.patterns import MAX_EXPONENT, ZipfAccesses, draw_accesses
from dlrm_sharded.calibration.plan_limits import MIN_ROWS, PlanLimits, whole_blocks, within_limits
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE

MAX_SHARDS = 100
"""Largest number of column shards on a rank."""

WIDEST = (32, 64, 128, 256, 256, 256, 512, 1024, 2048)
"""Largest widths, of which a plan draws one: lookups of a GPU depend on the widest table.
Most real tables have at most 256 columns."""

MAX_DRAWN_ROWS = 40_000_000
MIN_POOLING, MAX_POOLING = 0.1, 400.0
"""Ranges of the tables' rows and pooling factors."""

ZIPF_SHARES = (1.0, 0.5, 0.0)
"""Shares of Zipf-distributed tables that a plan may have, with equal probability."""

SINGLE_SHARE, ROW_WISE_SHARE = 0.2, 0.2
"""Fractions of the plans with a single shard on each rank, and with row-wise tables."""

REPLICA_SHARE, MAX_REPLICAS = 0.2, 3
REPLICA_BYTES = (1e4, 3e7)
"""Fraction of the plans with replicas, largest number of them, and range of their sizes."""

SEQUENCE_SHARE, SOME_SEQUENCES = 0.2, 0.5
"""Fraction of the plans with sequences, and the fraction of the tables that are sequences in half
of these plans; in the other half, all are."""

MAX_ROW_WISE = 4
"""Largest number of row-wise tables in a plan of computation."""

EXCHANGE_ROWS, EXCHANGE_WIDEST = 64, 256
MAX_EXCHANGE_COLS = 4096
"""Rows and largest width of a table, and largest mean number of columns of a rank, in plans of
exchanges; the latter is divided by the root of the number of ranks."""


def draw_computation(
    rng: np.random.Generator, *, world_size: int, batch_size: int, limits: PlanLimits
) -> list[DrawnTable]:
    """Draw 1 to `MAX_SHARDS` shards for every rank, with similar work, so that none waits long."""
    widest = int(rng.choice(WIDEST))
    zipf_share = float(rng.choice(ZIPF_SHARES))
    num_shards = 1
    if rng.random() >= SINGLE_SHARE:
        num_shards = round(2 * (MAX_SHARDS / 2) ** rng.random())
    # as in real tasks, few tables have most of the rows, and many small ones fit beside them
    rows_top = MIN_ROWS * (MAX_DRAWN_ROWS / MIN_ROWS) ** np.sqrt(rng.random())
    pooling_top = MIN_POOLING * (MAX_POOLING / MIN_POOLING) ** np.sqrt(rng.random())

    def draw_table(rank: int | None, rows_top: float = rows_top) -> DrawnTable:
        return DrawnTable(
            num_rows=round(MIN_ROWS * (rows_top / MIN_ROWS) ** rng.random()),
            num_cols=_draw_cols(rng, widest),
            pooling_factor=float(MIN_POOLING * (pooling_top / MIN_POOLING) ** rng.random()),
            accesses=draw_accesses(rng, zipf_share),
            rank=rank,
        )

    tables = []
    for rank in range(world_size):
        count = num_shards if num_shards < 4 else round(num_shards * rng.uniform(0.7, 1.0))
        tables += [draw_table(rank) for _ in range(count)]
    if world_size > 1 and rng.random() < ROW_WISE_SHARE:
        count = int(rng.integers(1, MAX_ROW_WISE + 1))
        tables += [draw_table(None, max(rows_top, 100 * MIN_ROWS)) for _ in range(count)]
    tables += _draw_replicas(rng, world_size) if limits.replicas else []
    return within_limits(limits, _with_sequences(rng, tables, widest), world_size, batch_size)


def draw_communication(
    rng: np.random.Generator, *, world_size: int, batch_size: int, limits: PlanLimits
) -> list[DrawnTable]:
    """Draw tiny tables whose columns are anything from all on one rank to even over all ranks."""
    columns = 32 * (MAX_EXCHANGE_COLS / 32) ** rng.random() * world_size**-0.5
    evenness = 10 ** rng.uniform(-0.7, 1.5)
    share = rng.dirichlet(np.full(world_size, evenness))
    pooling_factor = 0.3 * (30 / 0.3) ** rng.random()

    def tiny_table(num_rows: int, num_cols: int, rank: int | None) -> DrawnTable:
        return DrawnTable(num_rows, num_cols, pooling_factor, ZipfAccesses(0.0), rank)

    tables = []
    for rank in range(world_size):
        left = round(columns * world_size * share[rank] / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        while left > 0:
            cols = min(left, _draw_cols(rng, EXCHANGE_WIDEST))
            tables.append(tiny_table(EXCHANGE_ROWS, cols, rank))
            left -= cols
    if rng.random() < ROW_WISE_SHARE or not tables:
        rows = whole_blocks(EXCHANGE_ROWS, world_size)
        tables += [
            tiny_table(rows, _draw_cols(rng, EXCHANGE_WIDEST), None)
            for _ in range(rng.integers(1, 6))
        ]
    tables += _draw_replicas(rng, world_size) if limits.replicas else []
    return within_limits(
        limits,
        # sequences have as many numbers as the bags that they replace
        [
            new
            if new.pooled
            else dataclasses.replace(new, pooling_factor=old.num_cols / new.num_cols)
            for old, new in zip(tables, _with_sequences(rng, tables, EXCHANGE_WIDEST), strict=True)
        ],
        world_size,
        batch_size,
    )


def _with_sequences(
    rng: np.random.Generator, tables: list[DrawnTable], widest: int
) -> list[DrawnTable]:
    """Turn some tables, mostly none, into sequences of one width, as TorchRec's modules need."""
    if rng.random() >= SEQUENCE_SHARE:
        return tables
    share, num_cols = float(rng.choice([SOME_SEQUENCES, 1.0])), _draw_cols(rng, widest)
    return [
        dataclasses.replace(table, num_cols=num_cols, pooled=False)
        if not table.replicated and rng.random() < share
        else table
        for table in tables
    ]


def _draw_replicas(rng: np.random.Generator, world_size: int) -> list[DrawnTable]:
    """Draw replicas, mostly none; only small ones, because larger tables are not replicated."""
    if world_size == 1 or rng.random() >= REPLICA_SHARE:
        return []
    low, high = np.log(REPLICA_BYTES)
    return [
        DrawnTable(
            num_rows=max(int(np.exp(rng.uniform(low, high)) / (4 * cols)), MIN_ROWS),
            num_cols=cols,
            pooling_factor=float(rng.uniform(0.5, 4.0)),
            accesses=ZipfAccesses(float(rng.uniform(0.0, MAX_EXPONENT))),
            rank=None,
            replicated=True,
        )
        for cols in (
            _draw_cols(rng, EXCHANGE_WIDEST) for _ in range(rng.integers(1, MAX_REPLICAS + 1))
        )
    ]


def _draw_cols(rng: np.random.Generator, widest: int) -> int:
    """Draw a power of two, as tables have, or any multiple of 4, as column splits leave."""
    if rng.random() < 0.5:
        return int(2 ** rng.integers(2, widest.bit_length()))
    quarter = (widest / COLUMN_MULTIPLE) ** rng.random()
    return round(quarter) * COLUMN_MULTIPLE
