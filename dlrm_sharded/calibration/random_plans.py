"""Draws random plans that cover the range of real ones, for collecting costs.

Table features are drawn as NeuroShard (arXiv:2305.01868, sec. 3.1) augments its tables, over wider
ranges: every width that a column split can leave, rows and pooling factors on a log scale, Zipf
exponents from 0 to beyond those of Criteo and Meta's dlrm_datasets (about 0.9). Real accesses are
not Zipf-distributed, so a part of the tables has one of the other `access_patterns`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.accesses.patterns import MAX_EXPONENT, ZipfAccesses, draw_accesses
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE

MAX_SHARDS = 100
"""Largest number of column shards on a rank."""

MAX_COLS = 256
MIN_DRAWN_ROWS, MAX_DRAWN_ROWS = 100, 40_000_000
MIN_POOLING, MAX_POOLING = 0.1, 400.0
"""Ranges of the tables' widths, rows and pooling factors."""

WIDE_SHARE = 0.1
"""Fraction of the plans of computation in which each rank has a shard wider than `MAX_COLS`, where
plans may have any; the prices of narrower shards need the others."""

ZIPF_SHARES = (1.0, 0.5, 0.0)
"""Shares of Zipf-distributed tables that a plan may have, with equal probability."""

SINGLE_SHARE, ROW_WISE_SHARE = 0.2, 0.2
"""Fractions of the plans with a single shard on each rank, and with row-wise tables."""

REPLICA_SHARE, MAX_REPLICAS = 0.2, 3
REPLICA_BYTES = (1e4, 3e7)
"""Fraction of the plans with replicas, largest number of them, and range of their sizes."""

SEQUENCE_SHARE, SOME_SEQUENCES = 0.2, 0.5
"""Fraction of the plans with tables of sequences, as that of other layouts; and the fraction of
these plans' tables that are sequences in every other one, while they all are in the rest."""

SEQUENCE_BYTES = 1e8
"""Largest size of the vectors of sequences that a rank looks up where pooled vectors have no limit:
more take longer than a measurement should."""

MAX_ROW_WISE = 4
"""Largest number of row-wise tables in a plan of computation."""

COMMUNICATION_ROWS = 64
MAX_COMMUNICATION_COLS = 4096
"""Rows of a table, and largest mean number of columns per rank on one rank, in communication."""


@dataclass(frozen=True, slots=True)
class RankLimits:
    """Largest values of one rank.

    Args:
        table_bytes: memory for tables.
        ids_per_step: number of ids that it looks up.
        pooled_bytes: size of the pooled vectors that it looks up, before they are exchanged.
        widest_cols: range of the largest width of a plan, in powers of two.
        wide_cols: largest width of the shards in `WIDE_SHARE` of the plans.
        replicas: whether plans may have replicas.
    """

    table_bytes: int
    ids_per_step: int
    pooled_bytes: float = math.inf
    widest_cols: tuple[int, int] = (MAX_COLS, MAX_COLS)
    wide_cols: int = MAX_COLS
    replicas: bool = True


def draw_computation(
    rng: np.random.Generator, *, world_size: int, batch_size: int, limits: RankLimits
) -> list[DrawnTable]:
    """Draw 1 to `MAX_SHARDS` shards for every rank, with similar work, so that none waits long."""
    widest = _draw_widest(rng, limits)
    zipf_share = float(rng.choice(ZIPF_SHARES))
    num_shards = 1
    if rng.random() >= SINGLE_SHARE:
        num_shards = round(2 * (MAX_SHARDS / 2) ** rng.random())
    # as in real tasks, few tables have most of the rows, and many small ones fit beside them
    rows_top = MIN_DRAWN_ROWS * (MAX_DRAWN_ROWS / MIN_DRAWN_ROWS) ** np.sqrt(rng.random())
    pooling_top = MIN_POOLING * (MAX_POOLING / MIN_POOLING) ** np.sqrt(rng.random())
    tables = []
    for rank in range(world_size):
        count = num_shards if num_shards < 4 else round(num_shards * rng.uniform(0.7, 1.0))
        tables += [
            _draw_table(rng, rows_top, pooling_top, widest, zipf_share, rank) for _ in range(count)
        ]
    if world_size > 1 and rng.random() < ROW_WISE_SHARE:
        count = int(rng.integers(1, MAX_ROW_WISE + 1))
        tables += [
            _draw_table(
                rng, max(rows_top, 100 * MIN_DRAWN_ROWS), pooling_top, widest, zipf_share, None
            )
            for _ in range(count)
        ]
    tables += _draw_replicas(rng, world_size) if limits.replicas else []
    tables = _with_sequences(rng, tables, widest)
    # last, so that plans without wide shards are drawn as if there were none
    tables = _with_wide(rng, tables, world_size, limits)
    return within_limits(limits, tables, world_size, batch_size)


def draw_communication(
    rng: np.random.Generator, *, world_size: int, batch_size: int, limits: RankLimits
) -> list[DrawnTable]:
    """Draw tiny tables; their columns range from all on one rank to even over all ranks."""
    columns = 32 * (MAX_COMMUNICATION_COLS / 32) ** rng.random() * world_size**-0.5
    evenness = 10 ** rng.uniform(-0.7, 1.5)
    share = rng.dirichlet(np.full(world_size, evenness))
    pooling_factor = 0.3 * (30 / 0.3) ** rng.random()
    tables = []
    for rank in range(world_size):
        left = round(columns * world_size * share[rank] / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        while left > 0:
            cols = min(left, _draw_cols(rng))
            tables.append(
                DrawnTable(COMMUNICATION_ROWS, cols, pooling_factor, ZipfAccesses(0.0), rank)
            )
            left -= cols
    if rng.random() < ROW_WISE_SHARE or not tables:
        rows = _whole_blocks(COMMUNICATION_ROWS, world_size)
        tables += [
            DrawnTable(rows, _draw_cols(rng), pooling_factor, ZipfAccesses(0.0), None)
            for _ in range(rng.integers(1, 6))
        ]
    tables += _draw_replicas(rng, world_size) if limits.replicas else []
    return within_limits(
        limits,
        # as many numbers as the bags instead of which there are sequences
        [
            dataclasses.replace(new, pooling_factor=old.num_cols / new.num_cols)
            if not new.pooled
            else new
            for old, new in zip(tables, _with_sequences(rng, tables), strict=True)
        ],
        world_size,
        batch_size,
    )


def _with_sequences(
    rng: np.random.Generator, tables: list[DrawnTable], widest: int = MAX_COLS
) -> list[DrawnTable]:
    """Make sequences of some tables, mostly of none; all of one width, as in TorchRec's modules."""
    if rng.random() >= SEQUENCE_SHARE:
        return tables
    share, num_cols = float(rng.choice([SOME_SEQUENCES, 1.0])), _draw_cols(rng, widest)
    return [
        dataclasses.replace(table, num_cols=num_cols, pooled=False)
        if not table.replicated and rng.random() < share
        else table
        for table in tables
    ]


def _with_wide(
    rng: np.random.Generator, tables: list[DrawnTable], world_size: int, limits: RankLimits
) -> list[DrawnTable]:
    """Widen the busiest shard of each rank in a few plans; it reads as many bytes as before.

    Sequences have one width, so all of them are widened with one that is a rank's busiest.
    """
    if limits.wide_cols <= MAX_COLS or rng.random() >= WIDE_SHARE:
        return tables
    ratio = limits.wide_cols / MAX_COLS
    num_cols = round(MAX_COLS / COLUMN_MULTIPLE * ratio ** rng.random()) * COLUMN_MULTIPLE
    if rng.random() < 0.5:  # a power of two, as tables have
        num_cols = 1 << (num_cols - 1).bit_length()
    busiest = [
        max(
            (i for i, table in enumerate(tables) if table.rank == rank),
            key=lambda i: tables[i].pooling_factor * tables[i].num_cols,
        )
        for rank in range(world_size)
    ]
    with_sequences = not all(tables[i].pooled for i in busiest)
    return [
        _widened(table, num_cols)
        if i in busiest or (with_sequences and not table.pooled)
        else table
        for i, table in enumerate(tables)
    ]


def _widened(table: DrawnTable, num_cols: int) -> DrawnTable:
    """Return a table of other columns and about as many bytes, of which it reads as many."""
    factor = num_cols / table.num_cols
    return dataclasses.replace(
        table,
        num_cols=num_cols,
        num_rows=max(round(table.num_rows / factor), MIN_DRAWN_ROWS),
        pooling_factor=max(table.pooling_factor / factor, MIN_POOLING),
    )


def _draw_replicas(rng: np.random.Generator, world_size: int) -> list[DrawnTable]:
    """Draw tables that all ranks have, mostly none; small ones, as others are not replicated."""
    if world_size == 1 or rng.random() >= REPLICA_SHARE:
        return []
    low, high = np.log(REPLICA_BYTES)
    return [
        DrawnTable(
            num_rows=max(int(np.exp(rng.uniform(low, high)) / (4 * cols)), MIN_DRAWN_ROWS),
            num_cols=cols,
            pooling_factor=float(rng.uniform(0.5, 4.0)),
            accesses=ZipfAccesses(float(rng.uniform(0.0, MAX_EXPONENT))),
            rank=None,
            replicated=True,
        )
        for cols in (_draw_cols(rng) for _ in range(rng.integers(1, MAX_REPLICAS + 1)))
    ]


def _draw_table(
    rng: np.random.Generator,
    rows_top: float,
    pooling_top: float,
    widest: int,
    zipf_share: float,
    rank: int | None,
) -> DrawnTable:
    return DrawnTable(
        num_rows=round(MIN_DRAWN_ROWS * (rows_top / MIN_DRAWN_ROWS) ** rng.random()),
        num_cols=_draw_cols(rng, widest),
        pooling_factor=float(MIN_POOLING * (pooling_top / MIN_POOLING) ** rng.random()),
        accesses=draw_accesses(rng, zipf_share),
        rank=rank,
    )


def _draw_widest(rng: np.random.Generator, limits: RankLimits) -> int:
    """Draw the largest width of a plan."""
    least, most = limits.widest_cols
    if least == most:
        return most
    return int(2 ** rng.integers(least.bit_length() - 1, most.bit_length()))


def _draw_cols(rng: np.random.Generator, widest: int = MAX_COLS) -> int:
    """Draw a power of two, as tables have, or any multiple of 4, as column splits leave."""
    if rng.random() < 0.5:
        return int(2 ** rng.integers(2, widest.bit_length()))
    quarter = (widest / COLUMN_MULTIPLE) ** rng.random()
    return round(quarter) * COLUMN_MULTIPLE


def within_limits(
    limits: RankLimits, tables: list[DrawnTable], world_size: int, batch_size: int
) -> list[DrawnTable]:
    """Scale columns, rows and pooling factors down until every rank is within the limits."""
    tables = _narrowed(tables, world_size, max_cols=limits.pooled_bytes / (4 * batch_size))
    num_bytes, num_ids, vector_bytes = np.zeros((3, world_size))
    for table in tables:
        ranks = slice(None) if table.rank is None else table.rank
        num_ranks = world_size if table.rank is None else 1
        copies = num_ranks if table.replicated else 1
        num_bytes[ranks] += copies * 4 * table.num_rows * (table.num_cols + 1) / num_ranks
        ids_of_rank = batch_size * table.pooling_factor / num_ranks
        num_ids[ranks] += ids_of_rank
        vector_bytes[ranks] += 0 if table.pooled else 4 * table.num_cols * ids_of_rank
    rows_factor = min(1.0, limits.table_bytes / num_bytes.max())
    pooling_factor = min(1.0, limits.ids_per_step / num_ids.max())
    most_bytes = SEQUENCE_BYTES if math.isinf(limits.pooled_bytes) else limits.pooled_bytes
    of_sequences = min(pooling_factor, most_bytes / max(vector_bytes.max(), 1.0))
    scaled = []
    for table in tables:
        num_rows = max(int(table.num_rows * rows_factor), min(table.num_rows, MIN_DRAWN_ROWS))
        if table.rank is None and not table.replicated:
            num_rows = _whole_blocks(num_rows, world_size)
        factor = table.pooling_factor * (pooling_factor if table.pooled else of_sequences)
        scaled.append(dataclasses.replace(table, num_rows=num_rows, pooling_factor=float(factor)))
    return scaled


def _narrowed(tables: list[DrawnTable], world_size: int, *, max_cols: float) -> list[DrawnTable]:
    """Scale the tables' columns down until no rank looks up more than `max_cols` of them."""
    num_cols = np.zeros(world_size)
    for table in tables:
        num_cols[slice(None) if table.rank is None else table.rank] += table.num_cols
    if num_cols.max() <= max_cols:
        return tables
    factor = max_cols / num_cols.max() / COLUMN_MULTIPLE
    return [
        dataclasses.replace(t, num_cols=max(1, int(t.num_cols * factor)) * COLUMN_MULTIPLE)
        for t in tables
    ]


def _whole_blocks(num_rows: int, world_size: int) -> int:
    """Round down so that every rank gets a row block, which `row_blocks` does not ensure."""
    return max(num_rows // world_size, 1) * world_size
