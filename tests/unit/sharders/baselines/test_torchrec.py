"""TorchRec's planner as a sharder: what it says where it finds nothing."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dlrm_sharded.datasets.presets import criteo_kaggle
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.plans.layouts import is_replicated, is_row_wise
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.baselines import torchrec, torchrec_search
from dlrm_sharded.sharders.baselines.time_box import TimeBox
from dlrm_sharded.sharders.baselines.torchrec import TorchRecSharder


@pytest.mark.parametrize("informed", [True, False])
def test_names_the_users_table(informed: bool) -> None:
    tables = (Table("user.id", 10, 16, 1.0), Table("item.id", 10_000, 16, 1.0))
    task = ShardingTask(tables, Topology(2, 100_000, compute_device="cpu"), batch_size=64)
    with pytest.raises(InfeasibleTaskError, match=r"item\.id"):
        TorchRecSharder(informed=informed).shard(task)


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
@pytest.mark.parametrize("large", [0, 2])
def test_memory_of_each_rank(large: int, compute_device: str) -> None:
    """The large table goes where there is room for it, and the others do not fill that rank."""
    big = Table("big", 1000, 16, 1.0)
    tables = (big, *(Table(f"t{i}", 100, 16, 30.0) for i in range(4)))
    by_rank = [13_000] * 3
    by_rank[large] = 65_000
    topology = Topology(
        3, 13_000, compute_device=compute_device, memory_bytes_by_rank=tuple(by_rank)
    )
    task = ShardingTask(tables, topology, batch_size=96)
    shards = TorchRecSharder().shard(task).shards_by_table()
    assert [shard.rank for shard in shards["big"]] == [large]
    equal = dataclasses.replace(topology, memory_bytes_by_rank=None)
    with pytest.raises(InfeasibleTaskError, match=r"on 3 ranks of 0\.00 GiB"):
        TorchRecSharder().shard(dataclasses.replace(task, topology=equal))


def replicas(plan: ShardingPlan) -> set[str]:
    return {name for name, shards in plan.shards_by_table().items() if is_replicated(shards)}


@pytest.mark.parametrize("compute_device", ["cpu", "cuda"])
def test_replicates_small_tables(compute_device: str) -> None:
    """With all that it offers, and only if it is allowed; there are no replicas on one rank."""
    topology = Topology(2, 8 * GIB, compute_device=compute_device, optimizer_bytes_per_row=4)
    task = ShardingTask(criteo_kaggle(), topology, 8192)
    small = {table.name for table in task.tables if table.num_embeddings < 100}
    plan = TorchRecSharder(full=True, replicate=True).shard(task)
    validate(plan, task)
    assert replicas(plan) & small
    for others in (
        TorchRecSharder(full=True),
        TorchRecSharder(),
        TorchRecSharder(informed=False),
    ):
        assert not replicas(others.shard(task))
    alone = dataclasses.replace(task, topology=dataclasses.replace(topology, world_size=1))
    assert not replicas(TorchRecSharder(full=True, replicate=True).shard(alone))


def test_replicas_count_with_their_gradients() -> None:
    """TorchRec replicates a tiny table, unless the gradients of its replicas fit no rank."""
    large, tiny = Table("large", 50_000, 16, 1.0), Table("tiny", 10, 16, 1.0)
    topology = Topology(2, 50_000 * 16 * 4 // 2 + 10 * 16 * 12, compute_device="cuda")
    task = ShardingTask((large, tiny), topology, 8192)
    plan = TorchRecSharder(full=True, replicate=True).shard(task)
    validate(plan, task)
    assert replicas(plan) == {"tiny"}
    short = dataclasses.replace(topology, memory_bytes=topology.memory_bytes - 1)
    tight = dataclasses.replace(task, topology=short)
    plan = TorchRecSharder(full=True, replicate=True).shard(tight)
    validate(plan, tight)
    assert replicas(plan) == set()


def test_splits_rows_on_cpus_too() -> None:
    """TorchRec's planner does not offer it there by itself, and the columns cannot be split."""
    task = ShardingTask(
        (Table("t", 3000, 4, 1.0),), Topology(2, 30_000, compute_device="cpu"), batch_size=64
    )
    shards = TorchRecSharder(full=True, replicate=True).shard(task).shards
    assert [shard.num_rows for shard in shards] == [1500, 1500]
    with pytest.raises(InfeasibleTaskError):
        TorchRecSharder().shard(task)


def test_blocks_of_rows_stay_even() -> None:
    """TorchRec would split a table's rows in proportion to the memory, which it does not train."""
    table = Table("t", 3000, 16, 10.0)
    topology = Topology(3, 1, memory_bytes_by_rank=(70_000, 130_000, 100_000))
    shards = TorchRecSharder().shard(ShardingTask((table,), topology, batch_size=96)).shards
    assert is_row_wise(shards, table)
    assert {shard.num_rows for shard in shards} == {1000}


@pytest.mark.parametrize(
    "options",
    [
        {"min_partition": 6},
        {"min_partition": 0},
        {"timeout_s": 0},
        {"timeout_s": "abc"},
        {"replicate": "no"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    (key,) = options
    with pytest.raises(ConfigError, match=f"sharder.{key}"):
        TorchRecSharder(**options)


def test_a_blind_planner_replicates_nothing() -> None:
    with pytest.raises(ConfigError, match=r"sharder\.informed=true"):
        TorchRecSharder(informed=False, replicate=True)


MANY = tuple(Table(f"t{i}", 1000 + 10 * i, 16, 1.0) for i in range(40))


def clock_of(ticks_s: float) -> Callable[[], float]:
    """A clock on which every look takes the same time."""
    count = itertools.count()
    return lambda: next(count) * ticks_s


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What this package logged, without TorchRec's own lines."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("dlrm_sharded.")]


@pytest.fixture
def boxed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def start(ticks_s: float) -> None:
        monkeypatch.setattr(torchrec, "TimeBox", partial(TimeBox, clock=clock_of(ticks_s)))
        monkeypatch.setattr(torchrec_search, "OPTIONS_PER_LOOK", 20)

    return start


@pytest.mark.parametrize("informed", [True, False])
def test_the_time_limit_includes_the_pricing(
    boxed: Callable[[float], None], informed: bool
) -> None:
    boxed(1.0)
    task = ShardingTask(MANY, Topology(4, 2**30), batch_size=64)
    with pytest.raises(
        InfeasibleTaskError, match=r"priced \d+ of \d+ ways .* raise sharder\.timeo"
    ):
        TorchRecSharder(informed=informed, timeout_s=5).shard(task)


@pytest.mark.parametrize("informed", [True, False])
def test_the_time_limit_cuts_the_search(
    boxed: Callable[[float], None], caplog: pytest.LogCaptureFixture, informed: bool
) -> None:
    """A plan comes from what was found by then, and a line says that there may be a better one."""
    boxed(1.0)
    task = ShardingTask(MANY, Topology(4, 2**30), batch_size=64)
    caplog.set_level("INFO", "dlrm_sharded")
    plan = TorchRecSharder(informed=informed, timeout_s=60).shard(task)
    validate(plan, task)
    *progress, warning = said(caplog)
    assert any(" ways to place shards in " in line for line in progress)
    assert "stopped after sharder.timeout_s = 60 s with the best of" in warning


def test_a_search_that_finds_nothing_in_time_says_so(boxed: Callable[[float], None]) -> None:
    boxed(1.0)
    tight = sum(table.num_embeddings * 64 for table in MANY) // 4
    task = ShardingTask(MANY, Topology(4, tight), batch_size=64)
    with pytest.raises(InfeasibleTaskError, match=r"fits within sharder\.timeout_s = 60 s, in \d+"):
        TorchRecSharder(timeout_s=60).shard(task)


def test_without_hurry_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dlrm_sharded")
    TorchRecSharder().shard(ShardingTask(MANY[:3], Topology(2, 2**30), batch_size=64))
    assert said(caplog) == []
