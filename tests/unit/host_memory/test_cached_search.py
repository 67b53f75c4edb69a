"""`neuroshard` on tasks whose tables exceed the memory of all ranks."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dlrm_sharded import Constraints, Planner, RunContext, SharderContext, ShardingPlan, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.learned import learned_cost_model
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.explain.text import cached_text
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.host_memory.cache_prices import CachePrices, cache_forecast
from dlrm_sharded.host_memory.cached_search import cached_problem
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology, without_memory_limit
from dlrm_sharded.search.build_problem import build_problem
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import load_plan
from dlrm_sharded.sharders.neuroshard import neuroshard_sharder
from tests.unit.made_up import tables_of, task_of

RUN = RunContext("cuda", Hardware("NVIDIA A100-SXM4-40GB"))
MODEL = learned_cost_model(RUN)
MIB = 2**20


def large_task(world_size: int = 2, *, memory_mib: int = 300, **topology: Any) -> ShardingTask:
    """Six tables of 1.1 GiB together."""
    shapes = [(400_000 * (1 + i % 3), 64, 2.0 + 3 * i) for i in range(6)]
    topology = {"device": "cuda", "optimizer_bytes_per_row": 4, **topology}
    task = task_of(tables_of(*shapes), world_size, memory_mib * MIB, 8192, **topology)
    return with_profiles(task)


def planned(task: ShardingTask, **arguments: Any) -> tuple[ShardingPlan, PlanReport]:
    arguments = {"cache_tables": "auto", **arguments}
    sharder = neuroshard_sharder(SharderContext(RUN, MODEL), **arguments)
    return Planner(sharder, MODEL).plan(task)


@pytest.mark.parametrize(
    ("world_size", "topology"),
    [
        (1, {"memory_mib": 600}),
        (2, {}),
        (2, {"bytes_per_element": 12, "optimizer_bytes_per_row": 0}),
        (4, {"memory_mib": 120, "local_world_size": 2}),
        (3, {"memory_mib": 1, "memory_bytes_by_rank": (400 * MIB, 150 * MIB, 80 * MIB)}),
        (2, {"host_memory_bytes": 520 * MIB}),
    ],
    ids=["w1", "w2", "adam", "2x2", "uneven", "host_limit"],
)
def test_tables_beyond_memory_are_cached(world_size: int, topology: dict[str, Any]) -> None:
    task = large_task(world_size, **topology)
    assert task.table_bytes > sum(task.topology.rank_memory_bytes)
    plan, report = planned(task)
    validate(plan, task)  # memory of devices and hosts, equal load factors
    assert plan.load_factors
    assert 0.0 < report.lower_bound_ms < report.cost.cost_ms
    assert {t.table for t in report.cached.tables} == set(plan.load_factors)
    # the forward pass has the time of the caches
    without = MODEL.predict(plan, task)
    for now, before, added in zip(
        report.cost.per_rank, without.per_rank, report.cached.added_ms_by_rank, strict=True
    ):
        assert now.fwd_compute_ms == pytest.approx(before.fwd_compute_ms + added)
    assert plan == planned(task)[0], "the same task has the same plan"


def test_tasks_that_fit_know_nothing_of_caches() -> None:
    task = large_task(memory_mib=700)
    plan, report = planned(task)
    assert plan == planned(task, cache_tables="never")[0]
    assert report.cached is None
    assert not plan.load_factors
    fields = plan_json(plan, report)
    assert "cached" not in fields
    assert all("load_factor" not in shard for shard in fields["shards"])


def test_more_memory_is_better() -> None:
    costs = [
        planned(large_task(memory_mib=memory_mib))[1].cost.cost_ms
        for memory_mib in (100, 200, 300, 400, 600)
    ]
    assert costs == sorted(costs, reverse=True)


def test_the_report_says_what_is_cached() -> None:
    curve = ((0.0, 1.0), (0.05, 0.2), (1.0, 0.0))
    task = large_task()
    task = task.with_values(miss_ratio_curve={table.name: curve for table in task.tables})
    plan, report = planned(task)
    for table in report.cached.tables:
        expected = np.interp(table.load_factor, *zip(*curve, strict=True))
        assert table.miss_ratio == pytest.approx(expected)
        assert table.is_measured
    fields = plan_json(plan, report)["cached"]
    assert len(fields["tables"]) == len(plan.load_factors)
    assert fields["host_bytes_by_rank"] == plan.host_bytes_by_rank(task.topology)
    text = cached_text(report.cached)
    assert f"{len(plan.load_factors)} tables are in host memory" in text
    assert re.search(r"t\d: load factor 0\.\d+, [\d.]+ % of unique ids miss, [\d.]+ ms", text)
    diagnose(plan, MODEL.price(task), alternatives=True)  # has nothing to say of caches, and ends


def test_the_search_counts_what_a_plan_has() -> None:
    """Memory and loads of the problem with caches are those of the plan that comes of it."""
    task = large_task(3, memory_mib=1, memory_bytes_by_rank=(400 * MIB, 150 * MIB, 80 * MIB))
    plan, report = planned(task)
    problem = build_problem(
        MODEL.price(task), Constraints(), critical_path_share=0.0, split_error=0.0
    )
    cached = cached_problem(problem, plan.load_factors)
    states = State(problem), State(cached)
    for state in states:
        load_plan(state, plan.shards_by_table())
    used = cached.capacity_bytes - states[1].free_bytes
    assert used.tolist() == plan.bytes_by_rank(task.topology)
    added = (states[1].load - states[0].load).sum(axis=1)
    assert added == pytest.approx(report.cached.added_ms_by_rank, rel=1e-6)
    assert cached_problem(problem, {}) is problem


def test_a_warm_start_keeps_the_load_factors(tmp_path: Path) -> None:
    task = large_task()
    plan, report = planned(task)
    write_json(tmp_path / "plan.json", plan_json(plan, report))
    again, _ = planned(task, warm_start=tmp_path / "plan.json", max_moved_tables=1)
    assert again.load_factors == plan.load_factors


FITS_ON_GPUS = r"no plan can fit: .*; they fit on cuda with 56 GiB a rank$"
WITH_CACHES = (
    r"no plan can fit: .*; with sharder.cache_tables=auto, which no GPU has measured yet: "
    r"with 0 GiB a rank for tables "
    r"and \d+ GiB of host memory a rank, a plan with \d cached tables fits, load factors "
    r"[\d.]+ to [\d.]+; caching adds about [\d.]+ ms to a step$"
)
HOST_MEMORY = (
    r"host memory is limited to 0 GiB a rank, and no choice with less than \d+ was found "
    r"\(topology.host_memory_gib"
)


@pytest.mark.parametrize(
    ("changes", "cache_tables", "message"),
    [
        ({"device": "cpu"}, "auto", FITS_ON_GPUS),
        ({"device": "cpu"}, "never", FITS_ON_GPUS),
        ({}, "never", WITH_CACHES),
        ({"host_memory_bytes": 10 * MIB}, "auto", HOST_MEMORY),
        ({"memory_mib": 1}, "auto", r"add ranks or memory \(topology.memory_gib, or memory_bytes"),
    ],
    ids=["cpu", "never_on_cpu", "never", "host_memory", "too_small_for_caches"],
)
def test_refused(changes: dict[str, Any], cache_tables: str, message: str) -> None:
    with pytest.raises(InfeasibleTaskError, match=message):
        planned(large_task(**changes), cache_tables=cache_tables)


def test_caches_are_off_unless_asked_for() -> None:
    """In code and in conf, which all commands have."""
    with pytest.raises(InfeasibleTaskError, match=r"with sharder.cache_tables=auto, which no GPU"):
        neuroshard_sharder(SharderContext(RUN, MODEL)).shard(large_task())
    assert OmegaConf.load(CONF_DIR / "sharder" / "neuroshard.yaml").cache_tables == "never"


def test_a_cpu_task_is_told_of_caches_on_gpus() -> None:
    task = task_of(tables_of(*[(10**8, 128, 2.0)] * 3), 1, 10 * GIB, 8192)
    with pytest.raises(InfeasibleTaskError, match=r"; on cuda, with 56 GiB a rank for tables and"):
        planned(task)


def test_wrong_key() -> None:
    with pytest.raises(ConfigError, match=r"^sharder.cache_tables is 'always', must be auto or"):
        planned(large_task(), cache_tables="always")


def test_prices_follow_the_hardware() -> None:
    topology = large_task().topology
    h100 = CachePrices.of(topology, None)
    a100 = CachePrices.of(topology, MODEL.standing)
    assert a100.byte_ms == pytest.approx(2 * h100.byte_ms), "PCIe 4.0 and 5.0"
    stated = dataclasses.replace(topology, host_bytes_per_s=1e9)
    assert CachePrices.of(stated, MODEL.standing).byte_ms == pytest.approx(1e-6)
    crowded = CachePrices.of(Topology(64, 10**9), MODEL.standing)
    assert crowded.byte_ms > a100.byte_ms, "one host's memory"


def test_a_bound_knows_no_memory() -> None:
    task = large_task()
    assert lower_bound_ms(MODEL.price(task)) == np.inf
    assert np.isfinite(lower_bound_ms(MODEL.price(without_memory_limit(task))))
    assert cache_forecast(planned(large_task(memory_mib=700))[0], task, MODEL) is None
