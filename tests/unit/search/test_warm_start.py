"""From an earlier plan, no further than asked, and refused where it cannot be started from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_sharded import InvalidPlanError, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.search.state_shards import moved_bytes
from tests.unit.search.synthetic import (
    COST_ALONE,
    model_of,
    predicted,
    random_plan,
    searcher,
    unlimited_task,
)
from tests.unit.synthetic import tables_of, task_of

MODEL = "shipped"


def new_bytes(task: ShardingTask, before: ShardingPlan, after: ShardingPlan) -> int:
    """`test_state_shards` counts the cells of single tables."""
    old, new = before.shards_by_table(), after.shards_by_table()
    return sum(moved_bytes(task, old[name], new[name]) for name in old)


def moved_tables(before: ShardingPlan, after: ShardingPlan) -> int:
    old, new = before.shards_by_table(), after.shards_by_table()
    return sum(old[name] != new[name] for name in old)


def planned_from(path: Path, plan: ShardingPlan, task: ShardingTask, **keys: Any) -> ShardingPlan:
    write_json(path, plan.to_json())
    return searcher(MODEL, warm_start=path, **COST_ALONE, **keys).shard(with_profiles(task))


@pytest.mark.parametrize("hosts", [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_within_limits(hosts: tuple[int, int], tmp_path: Path) -> None:
    """Valid, no costlier, and moved no further; with no limit, limits only ever cost."""
    rng = np.random.default_rng(hosts)
    moved = 0
    for _ in range(6):
        task = unlimited_task(rng, hosts, int(rng.integers(2, 9)))
        plan = ShardingPlan(task.topology.world_size, random_plan(rng, task))
        before_ms = predicted(plan.shards, task, model_of(MODEL)).cost_ms
        some_bytes = task.table_bytes // 4
        for tables, num_bytes in ((None, None), (1, None), (2, some_bytes), (None, some_bytes)):
            gib = None if num_bytes is None else num_bytes / GIB
            keys = {"max_moved_tables": tables, "max_moved_gib": gib}
            new = planned_from(tmp_path / "plan.json", plan, task, **keys)
            validate(new, task)
            assert tables is None or moved_tables(plan, new) <= tables
            assert num_bytes is None or new_bytes(task, plan, new) <= num_bytes
            after_ms = predicted(new.shards, task, model_of(MODEL)).cost_ms
            assert after_ms <= before_ms * 1.01  # exchanges are linearised
            moved += moved_tables(plan, new)
        for keys in ({"max_moved_tables": 0}, {"max_moved_gib": 0.0}):
            new = planned_from(tmp_path / "plan.json", plan, task, **keys)
            assert new_bytes(task, plan, new) == 0
            if "max_moved_tables" in keys:
                assert sorted(new.shards) == sorted(plan.shards)
    assert moved > 0 or hosts == (1, 1)


def busy_task(world_size: int = 3, num_tables: int = 6, num_rows: int = 2000) -> ShardingTask:
    tables = tables_of(*((num_rows, 32, 9.0 + i) for i in range(num_tables)))
    return task_of(tables, world_size, 10**7, 2048)


def on_rank(task: ShardingTask, rank: int) -> ShardingPlan:
    return ShardingPlan.from_ranks(task, [rank] * len(task.tables))


def test_what_it_may_move_it_moves_well(tmp_path: Path) -> None:
    """Six tables on one rank of three: each that may move makes the plan cheaper."""
    task = busy_task()
    costs = []
    for limit in range(6):
        plan = on_rank(task, 1)
        new = planned_from(tmp_path / "p.json", plan, task, max_moved_tables=limit)
        costs.append(predicted(new.shards, with_profiles(task), model_of(MODEL)).cost_ms)
        assert moved_tables(plan, new) == min(limit, 4)
    assert costs[0] > costs[1] > costs[2] > costs[3] >= costs[4]


def test_keeps_constraints_while_it_moves(tmp_path: Path) -> None:
    task = busy_task()
    keys = {"pin": {"t5": [1], "t4": [1, 2]}, "unsplit": ["t0"], "together": [["t1", "t2"]]}
    new = planned_from(tmp_path / "plan.json", on_rank(task, 1), task, **keys).shards_by_table()
    assert {shard.rank for shard in new["t5"]} == {1}
    assert {shard.rank for shard in new["t4"]} <= {1, 2}
    assert len(new["t0"]) == 1
    assert {s.rank for s in new["t1"]} == {s.rank for s in new["t2"]}
    assert len({shard.rank for of_table in new.values() for shard in of_table}) == 3


def test_a_start_that_keeps_no_constraints(tmp_path: Path) -> None:
    """`test_state_shards` tries each kind."""
    path = tmp_path / "plan.json"
    with pytest.raises(InvalidPlanError, match=rf"the plan {path} violates sharder"):
        planned_from(path, on_rank(busy_task(), 1), busy_task(), pin={"t3": [0, 2]})


def test_a_start_for_something_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlanError, match=r"the plan is for 4 ranks, the job has 3"):
        planned_from(tmp_path / "plan.json", on_rank(busy_task(4), 1), busy_task())
