"""Drawn plans: within limits, over the whole range of real ones, and a fair part at any time."""

import dataclasses
import functools
import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm_sharded.accesses.patterns import MAX_EXPONENT, ReuseBinAccesses, ZipfAccesses
from dlrm_sharded.calibration import drawn_plans, plan_limits
from dlrm_sharded.calibration.drawn_plans import LOOKUPS, DrawnPlan, _of_tables, draw_plan
from dlrm_sharded.calibration.plan_limits import CALIBRATION, FIRST_RUN, MIN_ROWS, PlanLimits
from dlrm_sharded.calibration.random_plans import MAX_DRAWN_ROWS, MAX_POOLING, WIDEST
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.measuring.random_ids import draw_batch
from dlrm_sharded.measuring.rank_bench import Ids, _jagged
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.synthetic import USED_ONCE

BATCH_SIZE = 6336
LIMITS = PlanLimits(table_bytes=2 * 10**9, ids_per_step=600_000, vector_bytes=10**9)
NUM_PLANS = 180
TABLES = tuple(
    Table(f"t{i}", 1000 * 2 ** (i % 8), (16, 64, 512)[i % 3], 1.0 + i, USED_ONCE, pooled=i % 4 > 0)
    for i in range(12)
)


@functools.cache
def drawn(
    world_size: int,
    limits: PlanLimits = LIMITS,
    tables: tuple[Table, ...] = (),
    exchanging: tuple[int, ...] | None = None,
) -> list[DrawnPlan]:
    """The first plans of a collection on ranks that all compute and exchange."""
    if exchanging is None:
        exchanging = (world_size,) if world_size > 1 else ()
    return [
        draw_plan(
            number,
            np.random.default_rng([0, number]),
            limits,
            batch_sizes=(BATCH_SIZE, BATCH_SIZE // 4),
            computing=world_size,
            exchanging=exchanging,
            tables=tables,
        )
        for number in range(NUM_PLANS)
    ]


def shards_by_rank(plan: DrawnPlan) -> list[list[tuple[int, DrawnTable]]]:
    """(rows, table) of every shard of every rank."""
    shards: list[list[tuple[int, DrawnTable]]] = [[] for _ in range(plan.world_size)]
    for table in plan.tables:
        if table.rank is not None:
            shards[table.rank].append((table.num_rows, table))
            continue
        rows = [(0, table.num_rows)] * plan.world_size
        if not table.replicated:
            rows = row_blocks(table.num_rows, plan.world_size)
        assert len(rows) == plan.world_size, "a rank has no block, which TorchRec does not train"
        for on_rank, (start, stop) in zip(shards, rows, strict=True):
            on_rank.append((stop - start, table))
    return shards


@pytest.mark.parametrize("tables", [(), TABLES], ids=["random", "of a run"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 3, 11])
@pytest.mark.parametrize(
    "limits",
    [LIMITS, PlanLimits(10**7, 20_000, 10**6), PlanLimits(10**12, 10**9)],
    ids=["default", "tight", "wide"],
)
def test_ranks_keep_within_limits(
    world_size: int, limits: PlanLimits, tables: tuple[Table, ...]
) -> None:
    for plan in drawn(world_size, limits, tables):
        assert plan.batch_size % world_size == 0
        for shards in shards_by_rank(plan):
            ids = {
                id(table): plan.batch_size
                * table.pooling_factor
                * (1 / world_size if table.replicated else rows / table.num_rows)
                for rows, table in shards
            }
            assert sum(ids.values()) <= limits.ids_per_step * (1 + 1e-9)
            least = sum(4 * MIN_ROWS * (table.num_cols + 1) for _, table in shards)
            used = sum(4 * rows * (table.num_cols + 1) for rows, table in shards)
            assert used <= limits.table_bytes + least
            narrowest = 4 * plan.batch_size * COLUMN_MULTIPLE * len(shards)
            pooled = sum(4 * plan.batch_size * t.num_cols for _, t in shards if t.pooled)
            assert pooled <= limits.vector_bytes + narrowest
            vectors = sum(4 * t.num_cols * ids[id(t)] for _, t in shards if not t.pooled)
            assert vectors <= limits.vector_bytes * (1 + 1e-9)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_plans_are_what_torchrec_trains(world_size: int) -> None:
    for plan in itertools.chain(drawn(world_size), drawn(world_size, LIMITS, TABLES)):
        for table in plan.tables:
            assert table.num_cols % COLUMN_MULTIPLE == 0
            assert COLUMN_MULTIPLE <= table.num_cols <= max(WIDEST)
            assert 1 <= table.num_rows <= MAX_DRAWN_ROWS
            assert 0 < table.pooling_factor <= MAX_POOLING
            if isinstance(table.accesses, ZipfAccesses):
                assert 0 <= table.accesses.exponent <= MAX_EXPONENT
        assert len({table.num_cols for table in plan.tables if not table.pooled}) <= 1
        if plan.kind == "communication" or len(plan.tables) < 20:
            sharding, task = plan.as_plan("cpu", ranks_per_host=world_size)
            assert {shard.table for shard in sharding.shards} == {t.name for t in task.tables}
            assert all(table.reuse_histogram is not None for table in task.tables)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_random_plans_have_all_kinds_of_ranks(world_size: int) -> None:
    plans = [plan for plan in drawn(world_size) if plan.kind == "computation"]
    counts = [len(shards) for plan in plans for shards in shards_by_rank(plan)]
    assert min(counts) == 1
    assert max(counts) > 60
    tables = [table for plan in plans for table in plan.tables]
    assert min(table.num_cols for table in tables) == COLUMN_MULTIPLE
    assert max(table.num_cols for table in tables) >= 1024
    assert any(table.num_cols & (table.num_cols - 1) for table in tables)
    least_rows = min(table.num_rows for table in tables)
    assert MIN_ROWS - world_size < least_rows <= MIN_ROWS  # whole row blocks
    assert max(table.num_rows for table in tables) > 3_000_000
    assert max(table.pooling_factor for table in tables) > 50
    row_wise = [table for table in tables if table.rank is None and not table.replicated]
    assert bool(row_wise) == (world_size > 1)
    assert any(not table.pooled for table in tables)
    assert any(table.replicated for table in tables) == (world_size > 1)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_exchanges_are_balanced_and_unbalanced(world_size: int) -> None:
    shares, columns = [], []
    for plan in drawn(world_size):
        of_rank = [
            sum(t.num_cols for t in plan.tables if t.rank == rank) for rank in range(world_size)
        ]
        if plan.kind == "communication" and sum(of_rank):
            shares.append(max(of_rank) / sum(of_rank))
            columns.append(sum(of_rank))
    assert min(shares) < 1.2 / world_size
    assert max(shares) > 0.6
    assert min(columns) < 64 * world_size**0.5
    assert max(columns) > 2048


def test_the_number_says_all() -> None:
    for world_size in (1, 4):
        assert drawn.__wrapped__(world_size) == drawn(world_size)
        assert len({plan.tables for plan in drawn(world_size)}) == NUM_PLANS


@pytest.mark.parametrize("exchanging", [(2,), (4, 2), (48, 16, 8, 6, 4, 2)], ids=str)
def test_any_prefix_is_a_fair_part(exchanging: tuple[int, ...]) -> None:
    plans = drawn(2, LIMITS, (), exchanging)
    for stop in range(1, len(plans) + 1):
        sizes = [plan.world_size for plan in plans[:stop] if plan.kind == "communication"]
        assert abs(len(sizes) - stop / 3) < 1
        counts = [sizes.count(size) for size in exchanging]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == len(sizes)


@pytest.mark.parametrize(
    ("world_size", "replicas", "on_all_ranks"),
    [(2, True, ["row blocks", "replicas"]), (2, False, ["row blocks"]), (1, True, [])],
    ids=["two ranks", "without replicas", "alone"],
)
def test_each_round_has_every_kind_of_lookups(
    world_size: int, replicas: bool, on_all_ranks: list[str]
) -> None:
    limits = dataclasses.replace(LIMITS, replicas=replicas)
    with patch.object(drawn_plans, "_of_tables", wraps=_of_tables) as of_tables:
        plans = drawn.__wrapped__(world_size, limits, TABLES)
    names = [call.args[0] for call in of_tables.call_args_list]
    each = [*LOOKUPS, *on_all_ranks]
    assert names == list(itertools.islice(itertools.cycle(each), len(names)))
    num_lookups = sum(plan.kind == "computation" for plan in plans)
    assert num_lookups - len(names) == num_lookups // (len(each) + 1), "one of a round is random"


def test_kinds_show_other_parts_of_a_time() -> None:
    def tables_of(name: str) -> list[DrawnTable]:
        rng = np.random.default_rng(0)
        return [table for _ in range(9) for table in _of_tables(name, TABLES, 2, rng)]

    assert {table.num_cols for table in tables_of("wide") if table.pooled} == {512}
    assert max(table.num_cols for table in tables_of("narrow")) <= 16
    assert max(table.num_rows for table in tables_of("many")) <= 20_000
    own = [table.accesses for table in tables_of("task") + tables_of("few")]
    assert all(isinstance(accesses, ReuseBinAccesses) for accesses in own)
    assert {type(table.accesses) for table in tables_of("hot")} == {ZipfAccesses}
    assert all(t.replicated and t.pooled for t in tables_of("replicas") if t.rank is None)


def test_batches_say_how_many_ids_each_table_has():
    """A GPU would be waited for otherwise, as it is not where a dataset says so."""
    rng = np.random.default_rng(0)
    batch = draw_batch(drawn(1)[0].tables, 8, rng, batch_size=8)
    of_tables = [Ids(np.arange(3, dtype=np.int32), np.array([1, 2], np.int32))] * 2
    for ids in (batch, _jagged(of_tables)):
        lengths = ids.lengths().view(len(ids.keys()), -1)
        assert ids.length_per_key_or_none() == lengths.sum(dim=1).tolist()


@pytest.mark.parametrize(("device", "table_gib"), [("cpu", 0.5), ("cuda", 4.0)])
@pytest.mark.parametrize("free_gib", [0.7, 6.0, 79.1])
def test_plans_fit_the_rank_with_the_least_memory(
    device: str, table_gib: float, free_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(found: list[Any], mine: int) -> None:
        found[:] = [mine, int(2 * free_gib * GIB)]

    rank = Rank(0, 2, 0, 2, torch.device(device))
    monkeypatch.setattr(plan_limits, "free_bytes", lambda *_: int(free_gib * GIB))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for sizes in (FIRST_RUN, CALIBRATION):
        limits = plan_limits.plan_limits(rank, "sgd", sizes)
        assert 0 < limits.table_bytes <= sizes.memory_share * free_gib * GIB
        assert limits.table_bytes + 8 * limits.vector_bytes <= free_gib * GIB
        with_state = plan_limits.plan_limits(rank, "adam", sizes)
        assert with_state.table_bytes == limits.table_bytes // 3
        assert (limits.replicas, with_state.replicas) == (True, False)
    limits = plan_limits.plan_limits(rank, "sgd", FIRST_RUN)
    assert limits.table_bytes == int(min(table_gib, 0.1 * free_gib) * GIB)
