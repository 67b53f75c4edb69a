"""Random plans: within their limits, and over the whole range that real plans have."""

import dataclasses
import functools
import operator
from collections.abc import Callable

import numpy as np
import pytest

from dlrm_sharded.accesses.patterns import ZipfAccesses
from dlrm_sharded.calibration import random_plans
from dlrm_sharded.calibration.random_plans import (
    MAX_COLS,
    MAX_DRAWN_ROWS,
    MAX_EXPONENT,
    MAX_POOLING,
    MAX_REPLICAS,
    MAX_SHARDS,
    MIN_DRAWN_ROWS,
    MIN_POOLING,
    SEQUENCE_BYTES,
    RankLimits,
    draw_communication,
    draw_computation,
)
from dlrm_sharded.measuring.drawn_table import DrawnTable
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


def test_exchanges_move_from_a_third_of_an_id_to_30_ids_of_a_sample() -> None:
    plans = [tables for tables in communication(2) if all(table.pooled for table in tables)]
    pooling = [tables[0].pooling_factor for tables in plans]
    assert 0.3 <= min(pooling) < 0.4
    assert 20 < max(pooling) <= 30


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, *ODD_WORLD_SIZES])
def test_pooled_vectors_keep_within_a_limit(world_size: int) -> None:
    max_cols = 1000
    limits = dataclasses.replace(LIMITS, pooled_bytes=4.0 * BATCH_SIZE * max_cols)
    is_narrower = False
    for draw in DRAWS:
        pairs = zip(drawn(draw, world_size), drawn(draw, world_size, limits), strict=True)
        for free, tables in pairs:
            assert len(tables) == len(free)
            assert all(table.num_cols % COLUMN_MULTIPLE == 0 for table in tables)
            num_narrowest = sum(table.num_cols == COLUMN_MULTIPLE for table in tables)
            limited, unlimited = (
                [sum(table.num_cols for _, table in on) for on in shards_by_rank(of, world_size)]
                for of in (tables, free)
            )
            assert max(limited) <= max_cols + COLUMN_MULTIPLE * num_narrowest
            is_narrower |= any(map(operator.lt, limited, unlimited))
            pairs_of_bags = [(a, b) for a, b in zip(tables, free, strict=True) if a.pooled]
            assert max(unlimited) > max_cols or all(a == b for a, b in pairs_of_bags)
    assert is_narrower


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
def test_every_rank_computes_about_as_much(world_size: int) -> None:
    for tables in computation(world_size):
        counts = [len(shards) for shards in shards_by_rank(tables, world_size)]
        assert min(counts) >= 1
        assert max(counts) <= MAX_SHARDS + 4
        assert max(counts) <= 1.5 * min(counts) + 1


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


def test_communication_has_no_work_to_speak_of() -> None:
    for tables in communication(8):
        assert all(table.num_rows == 64 for table in tables if not table.replicated)
        assert sum(table.replicated for table in tables) <= MAX_REPLICAS


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_seed_says_all(world_size: int) -> None:
    for draw in DRAWS:
        assert drawn.__wrapped__(draw, world_size) == drawn(draw, world_size)
    assert len({tuple(tables) for tables in computation(world_size)}) == NUM_DRAWS


def test_plans_differ_in_their_widest_table() -> None:
    """All lookups of a GPU depend on the widest one; wide plans have narrow tables, too."""
    plans = computation(2, dataclasses.replace(LIMITS, widest_cols=(32, 1024)))
    widest = [max(table.num_cols for table in tables) for tables in plans[:60]]
    assert max(widest) > 512
    assert min(widest) <= 32
    assert sum(64 < width <= 512 for width in widest) > 10


@pytest.mark.parametrize("world_size", [1, 4])
def test_some_plans_have_accesses_that_are_not_zipf(world_size: int) -> None:
    names = [{table.accesses.name for table in tables} for tables in computation(world_size)]
    num_zipf = sum(of_plan == {"zipf"} for of_plan in names)
    num_others = sum("zipf" not in of_plan for of_plan in names)
    assert NUM_DRAWS / 6 < num_zipf < NUM_DRAWS / 2
    assert NUM_DRAWS / 6 < num_others < NUM_DRAWS / 2
    assert set().union(*names) == {"zipf", "uniform", "hot_set", "reuse_bins"}


def test_some_plans_have_sequences_of_one_width() -> None:
    """About as many as plans with row blocks; in half of them all tables are sequences."""
    for draw in DRAWS:
        plans = [[t for t in tables if not t.replicated] for tables in drawn(draw, 2)]
        shares = [np.mean([not table.pooled for table in tables]) for tables in plans]
        with_some = [share for share in shares if share > 0]
        assert 0.1 < len(with_some) / len(plans) < 0.3
        assert 0.2 < np.mean([share == 1 for share in with_some]) < 0.8
        for tables in plans:
            assert len({table.num_cols for table in tables if not table.pooled}) <= 1


@pytest.mark.parametrize("pooled_bytes", [float("inf"), 1e6])
def test_vectors_of_sequences_are_limited(pooled_bytes: float) -> None:
    limits = dataclasses.replace(LIMITS, pooled_bytes=pooled_bytes)
    found = []
    for tables in computation(2, limits):
        num_bytes = np.zeros(2)
        for table in tables:
            if not table.pooled:
                ranks = slice(None) if table.rank is None else table.rank
                ids = table.pooling_factor * BATCH_SIZE / (2 if table.rank is None else 1)
                num_bytes[ranks] += 4 * table.num_cols * ids
        found.append(num_bytes.max())
    most = min(pooled_bytes, SEQUENCE_BYTES)
    assert 0.9 * most < max(found) <= 1.001 * most


def test_exchanged_sequences_are_as_large_as_bags() -> None:
    """Each has as many numbers as the bag that would be in its place."""
    limits, num_sequences = RankLimits(2**60, 2**60, 2.0**60), 0
    for with_some, tables in zip(
        drawn(draw_communication, 4, limits), bags_alone(limits), strict=True
    ):
        for sequence, bag in zip(with_some, tables, strict=True):
            if not sequence.pooled:
                num_sequences += 1
                assert sequence.pooling_factor * sequence.num_cols == pytest.approx(bag.num_cols)
    assert num_sequences > 100


def bags_alone(limits: RankLimits) -> list[list[DrawnTable]]:
    """Return the same plans of communication without sequences."""
    drawn.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_plans, "SEQUENCE_SHARE", 0.0)
        found = drawn(draw_communication, 4, limits)
    drawn.cache_clear()
    return found


def test_few_plans_have_wide_shards() -> None:
    """One on each rank, which reads as many bytes as before; all else is drawn as without them."""
    limits = RankLimits(2**60, 2**60)
    wide = computation(2, dataclasses.replace(limits, wide_cols=2048))
    pairs = zip(computation(2, limits), wide, strict=True)
    changed = [(before, tables) for before, tables in pairs if before != tables]
    assert 0.03 < len(changed) / NUM_DRAWS < 0.2
    widths = set()
    for before, tables in changed:
        widened = [pair for pair in zip(before, tables, strict=True) if operator.ne(*pair)]
        assert {0, 1} <= {new.rank for _, new in widened}
        [num_cols] = {new.num_cols for _, new in widened}
        widths.add(num_cols)
        assert len({table.num_cols for table in tables if not table.pooled}) <= 1
        for old, new in widened:
            least = MIN_DRAWN_ROWS * num_cols
            assert new.num_rows * num_cols <= 1.01 * max(old.num_rows * old.num_cols, least)
            read, before_read = (t.pooling_factor * t.num_cols for t in (new, old))
            if new.pooled:  # vectors of sequences have a limit
                assert read == pytest.approx(max(before_read, MIN_POOLING * num_cols))
    assert min(widths) >= MAX_COLS
    assert 1024 < max(widths) <= 2048
    assert any(width & (width - 1) for width in widths)
    assert len({width for width in widths if not width & (width - 1)}) > 1
