"""Random plans: within their limits, and over the whole range that real plans have."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from dlrm_sharded.accesses.patterns import ZipfAccesses
from dlrm_sharded.calibration.random_plans import (
    MAX_COLS,
    MAX_DRAWN_ROWS,
    MAX_EXPONENT,
    MAX_POOLING,
    MIN_DRAWN_ROWS,
    RankLimits,
    draw_communication,
    draw_computation,
)
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.measuring.random_ids import draw_batch
from dlrm_sharded.measuring.rank_bench import Ids, _jagged
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE

WORLD_SIZES = (1, 2, 4, 8)
ODD_WORLD_SIZES = (3, 9, 11, 24)
BATCH_SIZE = 6336
LIMITS = RankLimits(table_bytes=2 * 10**9, ids_per_step=600_000)
NUM_DRAWS = 120


DRAWS = (draw_computation, draw_communication)


@functools.cache
def drawn(
    draw: Callable[..., list[DrawnTable]], world_size: int, limits: RankLimits = LIMITS
) -> list[list[DrawnTable]]:
    rngs = map(np.random.default_rng, range(NUM_DRAWS))
    keys = {"world_size": world_size, "batch_size": BATCH_SIZE, "limits": limits}
    return [draw(rng, **keys) for rng in rngs]


def computation(world_size: int, limits: RankLimits = LIMITS) -> list[list[DrawnTable]]:
    return drawn(draw_computation, world_size, limits)


def communication(world_size: int) -> list[list[DrawnTable]]:
    return drawn(draw_communication, world_size)


def shards_by_rank(tables: list[DrawnTable], world_size: int) -> list[list[tuple[int, DrawnTable]]]:
    """(rows, table) of every shard of every rank."""
    shards: list[list[tuple[int, DrawnTable]]] = [[] for _ in range(world_size)]
    for table in tables:
        if table.rank is not None:
            shards[table.rank].append((table.num_rows, table))
            continue
        rows = [(0, table.num_rows)] * world_size
        if not table.replicated:
            rows = row_blocks(table.num_rows, world_size)
        assert len(rows) == world_size, "a rank has no block, which TorchRec does not train"
        for on_rank, (start, stop) in zip(shards, rows, strict=True):
            on_rank.append((stop - start, table))
    return shards


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, *ODD_WORLD_SIZES])
@pytest.mark.parametrize(
    "limits",
    [LIMITS, RankLimits(10**7, 20_000), RankLimits(10**12, 10**9)],
    ids=["default", "tight", "wide"],
)
def test_computation_keeps_within_limits(world_size: int, limits: RankLimits) -> None:
    for tables in computation(world_size, limits):
        for shards in shards_by_rank(tables, world_size):
            ids = sum(
                BATCH_SIZE
                * table.pooling_factor
                * (1 / world_size if table.replicated else rows / table.num_rows)
                for rows, table in shards
            )
            assert ids <= limits.ids_per_step * (1 + 1e-9)
            floor = sum(4 * MIN_DRAWN_ROWS * (table.num_cols + 1) for _, table in shards)
            used = sum(4 * rows * (table.num_cols + 1) for rows, table in shards)
            assert used <= limits.table_bytes + floor


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, *ODD_WORLD_SIZES])
def test_tables_are_what_torchrec_trains(world_size: int) -> None:
    for draw in (computation, communication):
        for tables in draw(world_size):
            assert any(shards_by_rank(tables, world_size))
            for table in tables:
                assert table.num_cols % COLUMN_MULTIPLE == 0
                assert COLUMN_MULTIPLE <= table.num_cols <= MAX_COLS
                assert 1 <= table.num_rows <= MAX_DRAWN_ROWS
                assert 0 < table.pooling_factor <= MAX_POOLING
                if isinstance(table.accesses, ZipfAccesses):
                    assert 0 <= table.accesses.exponent <= MAX_EXPONENT
                assert table.rank is None or 0 <= table.rank < world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_computation_has_all_kinds_of_ranks(world_size: int) -> None:
    draws = computation(world_size)
    counts = [len(shards) for tables in draws for shards in shards_by_rank(tables, world_size)]
    assert min(counts) == 1
    assert max(counts) > 60
    tables = [table for tables in draws for table in tables]
    assert min(table.num_cols for table in tables) == COLUMN_MULTIPLE
    assert max(table.num_cols for table in tables) == MAX_COLS
    assert any(table.num_cols & (table.num_cols - 1) for table in tables)
    least_rows = min(table.num_rows for table in tables)
    assert MIN_DRAWN_ROWS - world_size < least_rows <= MIN_DRAWN_ROWS  # whole row blocks
    assert max(table.num_rows for table in tables) > 3_000_000
    assert max(table.pooling_factor for table in tables) > 50
    row_wise = [table for table in tables if table.rank is None]
    assert bool(row_wise) == (world_size > 1)
    if row_wise:
        assert max(table.num_rows for table in row_wise) > 500_000


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_communication_has_balanced_and_unbalanced_ranks(world_size: int) -> None:
    shares, columns, row_wise = [], [], 0
    for tables in communication(world_size):
        of_rank = [sum(t.num_cols for t in tables if t.rank == rank) for rank in range(world_size)]
        row_wise += any(table.rank is None for table in tables)
        if sum(of_rank):
            shares.append(max(of_rank) / sum(of_rank))
            columns.append(sum(of_rank))
    assert min(shares) < 1.15 / world_size
    assert max(shares) > 0.85
    assert min(columns) < 64 * world_size**0.5
    assert max(columns) > 2048
    assert 0.1 < row_wise / NUM_DRAWS < 0.4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_seed_says_all(world_size: int) -> None:
    for draw in DRAWS:
        assert drawn.__wrapped__(draw, world_size) == drawn(draw, world_size)
    assert len({tuple(tables) for tables in computation(world_size)}) == NUM_DRAWS


def test_batches_say_how_many_ids_each_table_has():
    """A GPU would be waited for otherwise, as it is not where a dataset says so."""
    rng = np.random.default_rng(0)
    batch = draw_batch(drawn(draw_computation, 1)[0], 8, rng, batch_size=8)
    of_tables = [Ids(np.arange(3, dtype=np.int32), np.array([1, 2], np.int32))] * 2
    for ids in (batch, _jagged(of_tables)):
        lengths = ids.lengths().view(len(ids.keys()), -1)
        assert ids.length_per_key_or_none() == lengths.sum(dim=1).tolist()
