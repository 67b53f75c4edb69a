"""Replicas in plans: where they pay, where they are named, and where they cannot be."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import RunContext, SharderContext, ShardingPlan, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.datasets.presets import criteo_kaggle
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.task import ShardingTask, with_optimizer
from dlrm_sharded.sharders.search import search_sharder
from tests.unit.search.synthetic import model_of, predicted, with_memory
from tests.unit.synthetic import task_of, with_topology

MODEL = model_of("shipped")


def tiny_tables(world_size: int = 2, *, rows: int = 50_000) -> ShardingTask:
    """Half of the tables are tiny, and all of them have vectors to exchange."""
    task = task_of(criteo_kaggle(64), world_size, batch_size=4096, optimizer_bytes_per_row=4)
    fewer = {table.name: min(table.num_embeddings, rows) for table in task.tables}
    return with_profiles(task.with_values(num_embeddings=fewer))


def with_adams_memory(task: ShardingTask) -> ShardingTask:
    """A task whose file names no optimizer, but counts Adam's state."""
    return with_topology(task, bytes_per_element=12, optimizer_bytes_per_row=0)


TASK = tiny_tables()


def plan_of(task: ShardingTask = TASK, **keys: Any) -> ShardingPlan:
    context = SharderContext(RunContext(), MODEL)
    plan = search_sharder(context, time_budget_s=5.0, **keys).shard(task)
    validate(plan, task)
    return plan


def cost_ms(plan: ShardingPlan, task: ShardingTask = TASK) -> float:
    return predicted(plan.shards, task, MODEL).cost_ms


def test_tiny_tables_are_replicated_where_that_pays() -> None:
    auto, never = plan_of(), plan_of(replicate="never")
    assert auto.replicated_tables
    assert not never.replicated_tables
    assert cost_ms(auto) < 0.97 * cost_ms(never)
    rows = {table.name: table.num_embeddings for table in TASK.tables}
    assert max(rows[name] for name in auto.replicated_tables) < 10_000
    costed = MODEL.cost_task(TASK)
    bound_ms, without_ms = lower_bound_ms(costed), lower_bound_ms(costed, replicas=False)
    assert bound_ms <= cost_ms(auto) < 1.1 * bound_ms
    assert bound_ms <= without_ms <= cost_ms(never) * (1 + 1e-9)


@pytest.mark.parametrize("names", [[], ["cat_0"], ["cat_2", "cat_8"]], ids=len)
def test_named_tables_are_replicated_and_no_others(names: list[str]) -> None:
    assert sorted(plan_of(replicate=names).replicated_tables) == names


def test_adam_has_no_replicas() -> None:
    on_gpus = with_topology(TASK, compute_device="cuda")
    for task in (with_adams_memory(TASK), with_optimizer(on_gpus, "adam")):
        assert not plan_of(task).replicated_tables
        with pytest.raises(ConfigError, match=r"names \['cat_0'\].*'adam'.*sgd or rowwise_adagrad"):
            plan_of(task, replicate=["cat_0"])
        costed = MODEL.cost_task(task)
        assert lower_bound_ms(costed) == lower_bound_ms(costed, replicas=False)


def test_one_rank_has_no_replicas() -> None:
    alone = tiny_tables(world_size=1)
    for replicate in ("auto", ["cat_0"]):
        assert not plan_of(alone, replicate=replicate).replicated_tables


@pytest.mark.parametrize(
    "keys",
    [{"pin": {"cat_0": [1]}}, {"together": [["cat_0", "cat_1"]]}, {"unsplit": ["cat_0"]}],
    ids=lambda keys: next(iter(keys)),
)
def test_a_table_has_one_restriction(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sharder.replicate and sharder.* both name \['cat_0'\]"):
        plan_of(replicate=["cat_0"], **keys)


def test_a_named_table_must_fit_every_rank() -> None:
    size = 50_000 * (64 * (4 + 8) + 4)
    uneven = with_memory(TASK, 10**9, size - 1)
    with pytest.raises(InfeasibleTaskError, match=rf"which takes {size:,} B on every rank"):
        plan_of(uneven, replicate=["cat_2"])


@pytest.mark.parametrize("full", [0.8, 0.99])
def test_memory_limits_replicas(full: float) -> None:
    tight = with_memory(TASK, int(TASK.table_bytes / 2 / full))
    plan = plan_of(tight)
    assert cost_ms(plan, tight) <= cost_ms(plan_of(tight, replicate="never"), tight) * 1.01


def test_an_earlier_plan_keeps_its_replicas(tmp_path: Path) -> None:
    earlier = plan_of(replicate=["cat_0", "cat_25"])
    write_json(tmp_path / "plan.json", earlier.to_json())
    keys: dict[str, Any] = {"warm_start": tmp_path / "plan.json", "max_moved_tables": 0}
    assert sorted(plan_of(**keys).shards) == sorted(earlier.shards)
