"""Tables in fp16: in plans, in memory, in costs, and where nothing else fits."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from dlrm_sharded import (
    Planner,
    RunContext,
    SearchSharder,
    SharderContext,
    Table,
    make_sharder,
    validate,
)
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.base import AdditiveCostModel
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.compute import CPU_HALF, READ_MB
from dlrm_sharded.cost.features import DEVICE_WORK, work_of
from dlrm_sharded.cost.shapes import Shapes
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.explain.text import explain
from dlrm_sharded.files.errors import InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.conftest import OF_A_CPU
from tests.unit.synthetic import in_turns, task_of, with_memory

TABLES = (Table("a", 1000, 64, 4.0), Table("b", 600, 32, 2.0), Table("c", 10, 16, 1.0))
TASK = with_profiles(task_of(TABLES, memory_bytes=10**6, optimizer_bytes_per_row=4))
TOPOLOGY = TASK.topology
PLAN = in_turns(TASK)


def half(plan: ShardingPlan, *names: str) -> ShardingPlan:
    shards = (
        dataclasses.replace(s, precision="fp16") if s.table in names else s for s in plan.shards
    )
    return dataclasses.replace(plan, shards=tuple(shards))


def test_a_plan_names_the_precision_only_of_half_tables() -> None:
    plan = half(PLAN, "a")
    keys = [shard.get("precision") for shard in plan.to_json()["shards"]]
    assert keys == ["fp16", None, None]
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert plan.half_tables() == ["a"]


def test_a_plan_gives_the_tables_of_a_task_their_precisions() -> None:
    assert with_precisions(TASK, PLAN) is TASK
    found = with_precisions(TASK, half(PLAN, "b"))
    assert [table.precision for table in found.tables] == ["fp32", "fp16", "fp32"]
    assert with_precisions(found, PLAN) == TASK


def test_a_task_says_the_precision_that_the_model_has() -> None:
    of_model = TASK.with_values(precision={"b": "fp16"})
    form = of_model.to_json()
    assert [table.get("precision") for table in form["tables"]] == [None, "fp16", None]
    assert ShardingTask.from_json(form).tables == of_model.tables


def test_weights_take_half_and_states_do_not() -> None:
    shard, of_half = PLAN.shards[0], half(PLAN, "a").shards[0]
    assert shard.bytes_on(TOPOLOGY) == 1000 * (64 * 4 + 4)
    assert of_half.bytes_on(TOPOLOGY) == 1000 * (64 * 2 + 4)
    with_moments = dataclasses.replace(TOPOLOGY, bytes_per_element=12)
    assert of_half.bytes_on(with_moments) == 1000 * (64 * 10 + 4)
    assert of_half.weight_bytes == 1000 * 64 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16", "cols": (0, 32)}, "'a' has shards in fp16 and in fp32; all of its"),
        ({"precision": "fp16", "replicated": True}, "'a' has replicas .* whole and in fp32"),
    ],
    ids=["mixed", "replicated"],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    first = dataclasses.replace(PLAN.shards[0], **changes)
    shards = [first, *PLAN.shards[1:]]
    if changes.get("replicated"):
        shards.append(dataclasses.replace(first, rank=1))
    elif "cols" in changes:
        shards.append(dataclasses.replace(PLAN.shards[0], cols=(32, 64)))
    with pytest.raises(InvalidPlanError, match=message):
        validate(ShardingPlan(2, tuple(shards)), TASK)
    validate(half(PLAN, "a", "c"), TASK)


def test_lookups_on_cpus_take_what_was_measured_there() -> None:
    compute = learned_cost_model(RunContext("cpu"), OF_A_CPU).compute
    exact, found = (
        compute.vectors(workload_of_plan(plan, TASK)) for plan in (PLAN, half(PLAN, "a"))
    )
    num = 1 + compute.forward.cache_gain.shape[1]
    # half the bytes stay in caches a little better
    for columns, factor in zip((slice(num), slice(num, 2 * num)), CPU_HALF, strict=True):
        assert (found[0, columns] <= factor * exact[0, columns]).all()
        np.testing.assert_allclose(found[0, columns], factor * exact[0, columns], rtol=0.1)
    assert found[0, READ_MB] == exact[0, READ_MB] / 2
    np.testing.assert_array_equal(found[1:], exact[1:])


def test_lookups_on_gpus_read_half() -> None:
    terms = DEVICE_WORK["cuda"].terms
    exact, found = (
        work_of(workload_of_plan(plan, TASK), DEVICE_WORK["cuda"])
        for plan in (PLAN, half(PLAN, "a"))
    )
    np.testing.assert_array_equal(found[1:], exact[1:])
    ratio = dict(zip(terms, found[0] / exact[0], strict=True))
    for term in ("id_lines", "id_columns", "unique_lines", "unique_columns"):
        assert ratio[term] == 0.5, term
    for term in ("bags", "ids", "pooled_columns", "unique_ids", "id_sort_passes", "id_warps"):
        assert ratio[term] == 1.0, term


def test_pieces_cost_what_plans_cost(of_device: AdditiveCostModel) -> None:
    plan = half(PLAN, "a", "c")
    task = with_precisions(TASK, plan)
    shapes = Shapes.from_task(task, of_device.compute)
    workload = workload_of_plan(plan, task)
    whole = shapes.columns.vectors[shapes.whole]
    np.testing.assert_allclose(whole, of_device.compute.vectors(workload))
    sizes = [shard.bytes_on(TOPOLOGY) for shard in plan.shards]
    assert shapes.columns.size_bytes[shapes.whole].tolist() == sizes
    of_shards, of_launches = of_device.compute.parts_ms(workload)
    parts = np.array([workload.by_rank(each) for each in of_shards]) + of_launches
    sums = workload.by_rank(of_device.compute.vectors(workload))
    np.testing.assert_allclose(
        parts.sum(axis=2).T, of_device.compute.times_ms(sums, workload.num_lookups()), rtol=1e-9
    )
    cost = of_device.predict(plan, TASK)
    assert cost.cost_ms >= lower_bound_ms(of_device.cost_task(task)) > 0


def search(model: AdditiveCostModel, precision: str = "fp32") -> SearchSharder:
    context = SharderContext(cost_model=model)
    return SearchSharder(context, table_precision=precision, time_budget_s=0.3, patience=1)


def test_tables_that_do_not_fit_in_fp32_are_said_to_fit_in_fp16(
    of_device: AdditiveCostModel,
) -> None:
    """260,000 B, 79,200 B and 680 B in fp32; two bytes less for each weight in fp16."""
    task = with_memory(TASK, 120_000)
    with pytest.raises(InfeasibleTaskError, match=r"table_precision=fp16, .* with 173,160 B"):
        search(of_device).shard(task)
    plan, report = Planner(search(of_device, "fp16"), of_device).plan(task)
    assert plan.half_tables() == ["a", "b", "c"]
    assert ", 3 tables in fp16" in explain(plan, report, task, None)
    assert report.gap is None or report.gap >= -1e-7
    validate(plan, task)
    with pytest.raises(InfeasibleTaskError, match=r"need 173,160 B"):
        search(of_device, "fp16").shard(with_memory(TASK, 60_000))


def test_a_search_keeps_the_precision_that_the_model_has(of_device: AdditiveCostModel) -> None:
    task = with_memory(TASK.with_values(precision={"b": "fp16"}), 180_000)
    assert search(of_device).shard(task).half_tables() == ["b"]


def test_a_small_table_in_fp16_is_replicated_in_fp32() -> None:
    """A table of 128 rows is looked up as often as one of a million: half of the exchange."""
    tables = tuple(
        Table(name, rows, 512, 500.0, precision="fp16", pooled=False)
        for name, rows in (("item", 10**6), ("category", 128))
    )
    topology = Topology(16, 2**33, 8, compute_device="cuda", optimizer_bytes_per_row=4)
    task = with_profiles(ShardingTask(tables, topology, 1024))
    run = RunContext("cuda", Hardware("NVIDIA H100 80GB HBM3"))
    model = learned_cost_model(run)
    plan, report = Planner(make_sharder("search", model, run=run), model).plan(task)
    assert plan.replicated_tables == ("category",)
    assert plan.half_tables() == ["item"]
    assert report.gap is not None
    assert report.gap >= -1e-7
    half = Shapes.from_task(task, model.compute).replicas
    whole = task.with_values(precision=dict.fromkeys(("item", "category"), "fp32"))
    full = Shapes.from_task(whole, model.compute).replicas
    np.testing.assert_allclose(half.block.vectors, full.block.vectors)
    sizes = [shard.bytes_on(topology) for shard in plan.shards if shard.replicated]
    assert set(sizes) == {half.block.size_bytes[1]} == {full.block.size_bytes[1]}


def test_row_blocks_have_the_precision_of_their_table(of_device: AdditiveCostModel) -> None:
    """Only row blocks fit: a row of four columns has as much state as weights."""
    task = dataclasses.replace(with_memory(TASK, 70_000), batch_size=64)
    task = with_profiles(dataclasses.replace(task, tables=(Table("t", 10_000, 4, 1.0),)))
    plan = search(of_device, "fp16").shard(task)
    assert {(s.num_rows, s.precision) for s in plan.shards} == {(5000, "fp16")}
    validate(plan, task)
    assert all(a.table == b.table for a, b in itertools.pairwise(plan.shards))
