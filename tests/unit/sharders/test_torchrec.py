"""TorchRec's planner as a sharder: what it says where it finds nothing."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import pytest
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator

from dlrm_sharded import InfeasibleTaskError, Table, validate
from dlrm_sharded.datasets.presets import criteo_kaggle
from dlrm_sharded.plans.layouts import is_row_wise
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.sharders import torchrec, torchrec_search
from dlrm_sharded.sharders.time_box import TimeBox
from dlrm_sharded.sharders.torchrec import TorchRecSharder
from dlrm_sharded.sharders.torchrec_search import TimedSearch
from tests.unit.synthetic import tables_of, task_of, with_memory, with_topology


@pytest.mark.parametrize("full", [True, False])
def test_names_the_users_table(full: bool) -> None:
    tables = (Table("user.id", 10, 16, 1.0), Table("item.id", 10_000, 16, 1.0))
    task = task_of(tables, 2, 100_000, 64)
    with pytest.raises(InfeasibleTaskError, match=r"item\.id"):
        TorchRecSharder(full=full).shard(task)


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
@pytest.mark.parametrize("large", [0, 2])
def test_memory_of_each_rank(large: int, compute_device: str) -> None:
    """The large table goes where it fits, and the others do not fill that rank."""
    tables = (Table("big", 1000, 16, 1.0), *tables_of(*[(100, 16, 30.0)] * 4))
    equal = task_of(tables, 3, 13_000, 96, device=compute_device)
    task = with_memory(equal, *(65_000 if rank == large else 13_000 for rank in range(3)))
    shards = TorchRecSharder().shard(task).shards_by_table()
    assert [shard.rank for shard in shards["big"]] == [large]
    with pytest.raises(InfeasibleTaskError, match=r"on 3 ranks of 0\.00 GiB"):
        TorchRecSharder().shard(equal)


FULL = TorchRecSharder(full=True)


def test_memory_counts_each_tables_own_optimizer() -> None:
    """The first table has the state of Adam, and takes as much as the three others together."""
    task = task_of([Table(name, 1000, 16, 1.0) for name in "abcd"], 2, 200_000)
    task = with_topology(task, optimizer_bytes_by_table={"a": (8, 0)})
    by_rank = TorchRecSharder().shard(task).shards_by_rank()
    assert sorted(len(shards) for shards in by_rank) == [1, 3]


def test_ids_are_stated_for_each_feature() -> None:
    """TorchRec counts a vector for each of the pooling factors of a table."""
    [table] = tables_of((100, 64, 12.0))
    task = task_of([dataclasses.replace(table, num_features=3)], 2, GIB, 64)
    planner = TorchRecSharder()._planner(task, TimedSearch(TimeBox(1.0)))
    [constraints] = planner._constraints.values()
    assert constraints.pooling_factors == [4.0, 4.0, 4.0]
    shared = dataclasses.replace(task.tables[0], features=("a", "b", "c"))
    named = dataclasses.replace(task, tables=(shared,))
    assert TorchRecSharder().shard(named) == TorchRecSharder().shard(task)


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
def test_replicates_small_tables(compute_device: str) -> None:
    """With all that it offers, and only if it is allowed; there are no replicas on one rank."""
    ranks = {"device": compute_device, "optimizer_bytes_per_row": 4}
    task = task_of(criteo_kaggle(), 2, 8 * GIB, 8192, **ranks)
    small = {table.name for table in task.tables if table.num_embeddings < 100}
    plan = FULL.shard(task)
    validate(plan, task)
    assert {*plan.replicated_tables} & small
    assert not TorchRecSharder().shard(task).replicated_tables
    assert not FULL.shard(with_topology(task, world_size=1)).replicated_tables


def test_replicas_count_with_their_gradients() -> None:
    """TorchRec replicates a tiny table, unless the gradients of its replicas fit no rank."""
    large, tiny = Table("large", 50_000, 16, 1.0), Table("tiny", 10, 16, 1.0)
    memory = 50_000 * 16 * 4 // 2 + 10 * 16 * 12
    for missing, replicated in ((0, ("tiny",)), (1, ())):
        task = task_of((large, tiny), 2, memory - missing, 8192, device="cuda")
        plan = FULL.shard(task)
        validate(plan, task)
        assert plan.replicated_tables == replicated


def test_splits_rows_on_cpus_too() -> None:
    """TorchRec's planner does not offer it there by itself, and the columns cannot be split."""
    task = task_of([Table("t", 3000, 4, 1.0)], 2, 30_000, 64)
    shards = FULL.shard(task).shards
    assert [shard.num_rows for shard in shards] == [1500, 1500]
    with pytest.raises(InfeasibleTaskError):
        TorchRecSharder().shard(task)


def test_blocks_of_rows_stay_even() -> None:
    """TorchRec would split a table's rows in proportion to the memory, which it does not train."""
    table = Table("t", 3000, 16, 10.0)
    task = with_memory(task_of([table], 3, 1, 96, device="cuda"), 70_000, 130_000, 100_000)
    shards = TorchRecSharder().shard(task).shards
    assert is_row_wise(shards, table)
    assert {shard.num_rows for shard in shards} == {1000}


MANY = tables_of(*((1000 + 10 * i, 16, 1.0) for i in range(40)))
TASK = task_of(MANY, 4, 2**30, 64, device="cuda")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package logged; TorchRec's planner must have no line of its own."""
    assert not [r for r in caplog.records if r.name.startswith("torchrec.")]
    return [r.getMessage() for r in caplog.records if r.name.startswith("dlrm_sharded.")]


@pytest.fixture
def boxed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the clock of a search's time limit, every look takes a second."""
    clock = map(float, itertools.count()).__next__
    monkeypatch.setattr(torchrec, "TimeBox", partial(TimeBox, clock=clock))
    monkeypatch.setattr(torchrec_search, "OPTIONS_PER_LOOK", 20)


@pytest.mark.parametrize("full", [True, False])
def test_the_time_limit_includes_the_estimates(boxed: None, full: bool):
    message = r"estimated \d+ of \d+ ways .* raise sharder\.timeo"
    with pytest.raises(InfeasibleTaskError, match=message):
        TorchRecSharder(full=full, timeout_s=5).shard(TASK)


@pytest.mark.parametrize("full", [True, False])
def test_the_time_limit_cuts_the_search(
    boxed: None, caplog: pytest.LogCaptureFixture, full: bool
) -> None:
    """A plan comes from what was found by then, and a line says that there may be a better one."""
    caplog.set_level("INFO")
    plan = TorchRecSharder(full=full, timeout_s=60).shard(TASK)
    validate(plan, TASK)
    *progress, warning = said(caplog)
    assert any(" ways to place shards in " in line for line in progress)
    assert "stopped after sharder.timeout_s = 60 s with the best of" in warning


def test_a_search_that_finds_nothing_in_time_says_so(boxed: None) -> None:
    task = with_memory(TASK, sum(table.num_embeddings * 64 for table in MANY) // 4)
    with pytest.raises(InfeasibleTaskError, match=r"fits within sharder\.timeout_s = 60 s, in \d+"):
        TorchRecSharder(timeout_s=60).shard(task)


def test_sequences_are_estimated_unpooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec itself takes them for such tables, in modules whose names may have dots."""
    seen: dict[str, bool] = {}
    estimate = EmbeddingPerfEstimator.estimate

    def noting(self: Any, options: Any, **others: Any) -> None:
        seen.update({option.name: option.is_pooled for option in options})
        estimate(self, options, **others)

    monkeypatch.setattr(EmbeddingPerfEstimator, "estimate", noting)
    tables = [
        Table(f"x{i}", 1000, 16, 20.0, pooled=i < 2, module=f"m.{i % 2}", num_features=1 + i % 2)
        for i in range(5)
    ]
    task = task_of(tables, 2, 2**30, 64, device="cuda")
    validate(TorchRecSharder().shard(task), task)
    assert seen == {"t0": True, "t1": True, "t2": False, "t3": False, "t4": False}
