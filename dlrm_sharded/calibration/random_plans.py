"""Random plans over the range of real ones, for collecting costs: numbers only, nothing measured.

Table features are drawn as NeuroShard (arXiv:2305.01868, sec. 3.1) augments its tables, wider:
every width that a column split can leave, rows and pooling factors on a log scale, Zipf exponents
from none to beyond those of Criteo and Meta's dlrm_datasets (about 0.9).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.tables import COLUMN_MULTIPLE

MAX_SHARDS = 100
MAX_COLS = 256
MIN_ROWS, MAX_ROWS = 100, 40_000_000
MIN_POOLING, MAX_POOLING = 0.1, 400.0
MAX_ALPHA = 1.25
SINGLE_SHARE, ROW_WISE_SHARE = 0.2, 0.2
MAX_LOCAL_ROW_WISE = 4
COMMUNICATION_ROWS = 64
MAX_COMMUNICATION_COLS = 4096


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """A table of a random plan, whole on one rank, or in even row blocks on all (rank None)."""

    num_rows: int
    num_cols: int
    pooling_factor: float
    alpha: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank can hold and look up while collecting."""

    table_bytes: int
    ids_per_step: int


def draw_computation(
    rng: np.random.Generator, *, world_size: int, batch_size: int, limits: Limits
) -> list[DrawnTable]:
    """About as much work for every rank, so that none waits long: 1 to `MAX_SHARDS` shards each."""
    num_shards = 1
    if rng.random() >= SINGLE_SHARE:
        num_shards = round(2 * (MAX_SHARDS / 2) ** rng.random())
    # small tables leave room for many; most of a real task's rows are in few tables
    rows_top = MIN_ROWS * (MAX_ROWS / MIN_ROWS) ** np.sqrt(rng.random())
    pooling_top = MIN_POOLING * (MAX_POOLING / MIN_POOLING) ** np.sqrt(rng.random())
    tables = []
    for rank in range(world_size):
        count = num_shards if num_shards < 4 else round(num_shards * rng.uniform(0.7, 1.0))
        tables += [_draw_table(rng, rows_top, pooling_top, rank) for _ in range(count)]
    if world_size > 1 and rng.random() < ROW_WISE_SHARE:
        count = int(rng.integers(1, MAX_LOCAL_ROW_WISE + 1))
        tables += [
            _draw_table(rng, max(rows_top, 100 * MIN_ROWS), pooling_top, None) for _ in range(count)
        ]
    return _within(limits, tables, world_size, batch_size)


def draw_communication(
    rng: np.random.Generator, *, world_size: int, batch_size: int, limits: Limits
) -> list[DrawnTable]:
    """Tiny tables, in all on one rank at one extreme, evenly over all at the other."""
    columns = 32 * (MAX_COMMUNICATION_COLS / 32) ** rng.random() * world_size**-0.5
    evenness = 10 ** rng.uniform(-0.7, 1.5)
    share = rng.dirichlet(np.full(world_size, evenness))
    pooling_factor = 0.3 * (30 / 0.3) ** rng.random()
    tables = []
    for rank in range(world_size):
        left = round(columns * world_size * share[rank] / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        while left > 0:
            cols = min(left, _draw_cols(rng))
            tables.append(DrawnTable(COMMUNICATION_ROWS, cols, pooling_factor, 0.0, rank))
            left -= cols
    if rng.random() < ROW_WISE_SHARE or not tables:
        rows = _whole_blocks(COMMUNICATION_ROWS, world_size)
        tables += [
            DrawnTable(rows, _draw_cols(rng), pooling_factor, 0.0, None)
            for _ in range(rng.integers(1, 6))
        ]
    return _within(limits, tables, world_size, batch_size)


def _draw_table(
    rng: np.random.Generator, rows_top: float, pooling_top: float, rank: int | None
) -> DrawnTable:
    return DrawnTable(
        num_rows=round(MIN_ROWS * (rows_top / MIN_ROWS) ** rng.random()),
        num_cols=_draw_cols(rng),
        pooling_factor=float(MIN_POOLING * (pooling_top / MIN_POOLING) ** rng.random()),
        alpha=float(rng.uniform(0.0, MAX_ALPHA)),
        rank=rank,
    )


def _draw_cols(rng: np.random.Generator) -> int:
    """Half of them powers of two, as tables are; half any multiple of 4, as splits leave them."""
    if rng.random() < 0.5:
        return int(2 ** rng.integers(2, 9))
    quarter = (MAX_COLS / COLUMN_MULTIPLE) ** rng.random()
    return round(quarter) * COLUMN_MULTIPLE


def _within(
    limits: Limits, tables: list[DrawnTable], world_size: int, batch_size: int
) -> list[DrawnTable]:
    """The tables with rows, and ids per sample, cut down to what a rank can hold and look up."""
    num_bytes, num_ids = np.zeros(world_size), np.zeros(world_size)
    for table in tables:
        ranks = slice(None) if table.rank is None else table.rank
        blocks = world_size if table.rank is None else 1
        num_bytes[ranks] += 4 * table.num_rows * (table.num_cols + 1) / blocks
        num_ids[ranks] += batch_size * table.pooling_factor / blocks
    rows_factor = min(1.0, limits.table_bytes / num_bytes.max())
    pooling_factor = min(1.0, limits.ids_per_step / num_ids.max())
    cut = []
    for table in tables:
        num_rows = max(int(table.num_rows * rows_factor), min(table.num_rows, MIN_ROWS))
        if table.rank is None:
            num_rows = _whole_blocks(num_rows, world_size)
        pooled = table.pooling_factor * pooling_factor
        cut.append(dataclasses.replace(table, num_rows=num_rows, pooling_factor=pooled))
    return cut


def _whole_blocks(num_rows: int, world_size: int) -> int:
    """About `num_rows` that give every rank a block: else `row_blocks` may not reach the last."""
    return max(num_rows // world_size, 1) * world_size
