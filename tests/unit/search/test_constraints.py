"""What users ask of a plan is kept, or refused with the table and the key."""

import dataclasses
import itertools
import math
import time
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dlrm_sharded import ShardingPlan, Table, validate
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.plans.task import GIB, ShardingTask
from tests.unit.search.synthetic import MODELS, searcher
from tests.unit.synthetic import packed_tasks, tables_of, task_of

Keys = dict[str, Any]


MEMORY_RATIOS = st.sampled_from([0.5, 1.1, 2.0, 10.0])
HOSTS = [(hosts, per_host) for hosts in (1, 2, 3) for per_host in (1, 2)]


@st.composite
def constrained(draw: st.DrawFn) -> tuple[ShardingTask, Keys]:
    """A task, and what is asked of its plan: some of it cannot be had."""
    task = draw(packed_tasks(MEMORY_RATIOS, rows=st.integers(1, 2000), most_tables=7, hosts=HOSTS))
    names, world_size = [table.name for table in task.tables], task.topology.world_size
    group = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    ranks = st.lists(st.integers(0, world_size - 1), min_size=1, max_size=3)
    reserved = st.floats(0, max(task.topology.rank_memory_bytes) / 4 / GIB)
    keys: Keys = {
        "pin": draw(st.dictionaries(st.sampled_from(names), ranks, max_size=2)),
        "together": draw(st.lists(group, max_size=2)),
        "apart": draw(st.lists(group, max_size=2)),
        "unsplit": draw(group),
        "split": draw(st.sampled_from(["auto", "never"])),
        "rows": "never",
        "reserved_gib": draw(
            st.just(0.0) | reserved | st.lists(reserved, min_size=world_size, max_size=world_size)
        ),
    }
    return task, {key: value for key, value in keys.items() if draw(st.booleans())}


def assert_kept(plan: ShardingPlan, task: ShardingTask, keys: Keys) -> None:
    validate(plan, task)
    shards = plan.shards_by_table()
    ranks = {name: {shard.rank for shard in of_table} for name, of_table in shards.items()}
    for name, allowed in keys.get("pin", {}).items():
        assert ranks[name] <= set(allowed)
    for group in keys.get("together", ()):
        assert len(set().union(*(ranks[name] for name in group))) <= 1
    for group in keys.get("apart", ()):
        assert sum(len(ranks[name]) for name in group) == len(
            set().union(*(ranks[n] for n in group))
        )
    whole = [*keys.get("unsplit", ()), *(n for group in keys.get("together", ()) for n in group)]
    if keys.get("split") == "never":
        whole = [name for name, of_table in shards.items() if not of_table[0].replicated]
    if keys.get("rows") == "never":
        for table in task.tables:
            assert all(s.num_rows == table.num_embeddings for s in shards[table.name])
    assert all(len(shards[name]) == 1 for name in whole)
    reserved = keys.get("reserved_gib", 0.0)
    reserved = reserved if isinstance(reserved, list) else [reserved] * plan.world_size
    for used, memory, gib in zip(
        plan.bytes_by_rank(task.topology), task.topology.rank_memory_bytes, reserved, strict=True
    ):
        assert used <= max(memory - int(gib * GIB), 0)


@given(case=constrained(), model=st.sampled_from(MODELS), seed=st.integers(0, 3))
def test_kept_or_refused(case: tuple[ShardingTask, Keys], model: str, seed: int) -> None:
    task, keys = case
    before = repr(task), repr(keys)
    try:
        sharder = searcher(model, seed=seed, patience=1, **keys)
        plan = sharder.shard(task)
    except ConfigError as error:
        event("refused")
        assert "sharder." in str(error)
        assert any(repr(table.name) in str(error) for table in task.tables)
    except InfeasibleTaskError as error:
        event("none found")
        assert any(number in str(error) for number in ("B", "GiB"))
    else:
        event("plan")
        assert_kept(plan, task, keys)
    assert (repr(task), repr(keys)) == before


TASK = task_of(tables_of(*[(100, 16, 2.0)] * 5), 3, 10**6, 256)


def plan(**keys: Any) -> ShardingPlan:
    return searcher(**{"patience": 1} | keys).shard(TASK)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pin": {"x": [0]}}, "sharder.pin names a table 'x' that the task lacks"),
        ({"together": [["t0", "x"]]}, "sharder.together names a table 'x'"),
        ({"unsplit": ["x"]}, "sharder.unsplit names a table 'x'"),
        ({"pin": {"t1": [0, 3]}}, "puts table 't1' on rank 3; the ranks are 0 to 2"),
        ({"pin": {"t1": [-1]}}, "puts table 't1' on rank -1"),
        ({"pin": {"t1": []}}, "sharder.pin gives table 't1' no ranks"),
        ({"pin": {"t1": [1.0]}}, "sharder.pin.t1 has 1.0, not the number of a rank"),
        ({"pin": {"t1": 2}}, "sharder.pin.t1 is 2; it must be a list of ranks"),
        ({"pin": ["t1"]}, r"sharder.pin is \['t1'\]; it must have lists of ranks by table"),
        ({"together": ["t0", "t1"]}, "a group of sharder.together is 't0'; it must be a list"),
        ({"apart": [["t0"], None]}, "a group of sharder.apart is None; it must be a list"),
        ({"split": "no"}, "sharder.split is 'no'; it must be auto or never"),
        ({"rows": False}, "sharder.rows is False; it must be auto or never"),
        ({"unsplit": "t0"}, "sharder.unsplit is 't0'; it must be a list of tables"),
        ({"together": [["t0", "t1"], ["t2", "t1"]]}, "sharder.together has table 't1' twice"),
        (
            {"together": [["t0", "t1", "t2"]], "apart": [["t2", "t4", "t0"]]},
            r"sharder.together and sharder.apart both have \['t0', 't2'\]",
        ),
        (
            {"together": [["t0", "t1"]], "pin": {"t0": [0, 1], "t1": [2]}},
            r"sharder.pin leaves no rank for the tables \['t0', 't1'\]",
        ),
        (
            {"apart": [["t0", "t1", "t2"]], "pin": {"t0": [1], "t2": [1, 1]}},
            "sharder.apart has 't0' and 't2', but sharder.pin puts both on rank 1",
        ),
        ({"replicate": "sometimes"}, "must be auto, never or a list of tables"),
        ({"replicate": 3}, "must be auto, never or a list of tables"),
        ({"replicate": ["x"]}, "sharder.replicate names a table 'x' that the task lacks"),
        ({"reserved_gib": -1}, "sharder.reserved_gib is -1; it must be a number >= 0"),
        ({"reserved_gib": [0, 0]}, "sharder.reserved_gib has 2 values for 3 ranks"),
        ({"reserved_gib": "1"}, "sharder.reserved_gib is '1'"),
        ({"reserved_gib": float("nan")}, "sharder.reserved_gib is nan"),
        ({"critical_path_share": 1.1}, r"sharder\.critical_path_share is 1\.1"),
        ({"seed": -1}, r"sharder\.seed is -1"),
        ({"time_budget_s": 0}, r"sharder\.time_budget_s is 0; it must be a number > 0"),
        ({"patience": -1}, r"sharder\.patience is -1"),
        ({"split_error": -0.1}, r"sharder\.split_error is -0\.1"),
        ({"exchange_precision": "half"}, r"^sharder.exchange_precision is 'half'; known: "),
        ({"exchange_precision": "fp8"}, r"is 'fp8', which ranks on cpu cannot exchange"),
        ({"table_precision": "bf16"}, r"^sharder.table_precision.*'bf16'; known: fp32, fp16$"),
        ({"table_precision": None}, r"^sharder.table_precision.* is None"),
        ({"max_moved_tables": 3}, r"name its plan\.json in sharder\.warm_start"),
        ({"max_moved_gib": 0.5}, r"name its plan\.json in sharder\.warm_start"),
        ({"warm_start": "p", "max_moved_tables": -1}, r"sharder\.max_moved_tables is -1"),
        ({"warm_start": "p", "max_moved_tables": 1.5}, r"sharder\.max_moved_tables is 1\.5"),
        ({"warm_start": "p", "max_moved_gib": -0.1}, r"sharder\.max_moved_gib is -0\.1"),
        ({"warm_start": "p", "max_moved_gib": math.inf}, r"sharder\.max_moved_gib is inf"),
    ],
    ids=lambda value: repr(value)[:50] if isinstance(value, dict) else "",
)
def test_what_cannot_be_meant(keys: Keys, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**keys)


@pytest.mark.parametrize("gib", [1.0, 1e300, [0.5, 0.5, 0.5]])
def test_nothing_left(gib: float | list[float]) -> None:
    with pytest.raises(InfeasibleTaskError, match="reserved_gib leaves nothing of"):
        plan(reserved_gib=gib)


def test_nothing_left_on_one_rank() -> None:
    assert {shard.rank for shard in plan(reserved_gib=[0.0, 0.0, 0.5]).shards} == {0, 1}


def test_without_a_time_limit_the_plan_is_the_same_at_any_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock on which every look takes a day ends a search with a time limit, and no other."""
    task = dataclasses.replace(TASK, tables=(*TASK.tables, Table("big", 3000, 64, 9.0)))
    limits: Keys = {"time_budget_s": None, "patience": 2}
    expected = searcher(**limits).shard(task)
    days = itertools.count(step=86_400.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(days))
    assert searcher(**limits).shard(task) == expected


def test_more_apart_than_ranks() -> None:
    with pytest.raises(InfeasibleTaskError, match="no plan was found for 5 tables"):
        plan(apart=[["t0", "t1", "t2", "t3"]])


def test_row_blocks_only_where_a_table_may_be() -> None:
    """The narrowest columns fit no rank; the ranks of a host are enough for blocks."""
    tall = Table("tall", 4000, 4, 1.0)
    task = task_of((tall,), 4, 40_000, 256, local_world_size=2)
    for ranks, found in (([0, 1, 2, 3], True), ([2, 3], True), ([1, 2, 3], True), ([1, 2], False)):
        sharder = searcher(patience=1, pin={"tall": ranks})
        if found:
            assert_kept(sharder.shard(task), task, {"pin": {"tall": ranks}})
        else:
            with pytest.raises(InfeasibleTaskError):
                sharder.shard(task)
