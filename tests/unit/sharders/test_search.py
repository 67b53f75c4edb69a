"""The sharder as a whole: against all plans there are, on many tasks and on stress tasks."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_sharded import Constraints, PlanCost, Planner, SearchSharder, ShardingPlan, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.precision_conversions import CPU_CONVERSIONS, ConversionTimes
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.datasets.presets import dlrm_datasets_pool, draw_tables
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import GIB, ShardingTask, read_task
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.heuristics import GreedySharder, RandomSharder
from tests.stress_tasks import FIRST_MIXED, stress_task
from tests.unit.search.synthetic import (
    COST_ALONE,
    MODELS,
    all_plans,
    model_of,
    predicted,
    searcher,
    tiny_task,
)
from tests.unit.synthetic import tables_of, task_of

ROUNDING = 1e-9


TINY: dict[str, tuple[dict[str, Any], float, float]] = {
    "2_or_3_ranks": ({"num_tables": 3}, 1.01, 1.002),
    "partly_full": ({"num_tables": 3, "full": 0.3}, 1.01, 1.002),
    "nearly_full": ({"num_tables": 2, "full": 0.95}, 1.01, 1.002),
    "2x2": ({"num_tables": 2, "hosts": (2, 2), "full": 0.3}, 1.12, 1.03),
    "strong_caches": ({"num_tables": 3}, 1.1, 1.02),
    "a_sequence": ({"num_tables": 2, "sequences": (0,), "modules": "ab"}, 1.02, 1.02),
    "two_sequences": ({"num_tables": 2, "sequences": (0, 1), "modules": "ab"}, 1.02, 1.02),
    "in_one_module": (
        {"num_tables": 2, "sequences": (0, 1), "modules": "aa", "width": 16, "full": 0.8},
        *(1.02, 1.02),
    ),
}
"""Shape of a task, and how much a plan costs over the best one, at most and on average. On
hosts, exchanges are linearised; where caches overflow, pieces cost much else than on most ranks."""

CASES = [
    *itertools.product(list(TINY)[:4], ["shipped"]),
    ("2x2", "links"),
    ("strong_caches", "overflowing"),
    *itertools.product(list(TINY)[5:], ["shipped", "plain", "links"]),
]

NUM_TINY = 3


@functools.cache
def workloads_of_all_plans(task: ShardingTask) -> list[Workload]:
    """Enumerate the plans of a task once for all models."""
    world_size = task.topology.world_size
    return [workload_of_plan(ShardingPlan(world_size, s), task) for s in all_plans(task)]


def costs_of_all_plans(task: ShardingTask, model: LearnedCostModel) -> list[float]:
    hosts = model.cost_task(task).hosts
    return [model.predict_workload(w, hosts).cost_ms for w in workloads_of_all_plans(task)]


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_against_every_plan_of_a_tiny_task(shape: str, name: str) -> None:
    keys, most, mean = TINY[shape]
    ratios = []
    for seed in range(NUM_TINY):
        task, model = tiny_task(seed, **keys), model_of(name, seed)
        costs = costs_of_all_plans(task, model)
        _, report = Planner(searcher(name, seed, patience=20, **COST_ALONE), model).plan(task)
        ratios.append(report.cost.cost_ms / min(costs))
        assert report.lower_bound_ms <= min(costs) * (1 + ROUNDING)
        assert report.gap >= -ROUNDING
    assert min(ratios) >= 1 - ROUNDING
    assert max(ratios) <= most
    assert np.mean(ratios) <= mean


def found(sharder: Sharder, task: ShardingTask) -> ShardingPlan | None:
    try:
        return sharder.shard(task)
    except InfeasibleTaskError:
        return None


NUM_TASKS = 40


def test_a_plan_wherever_a_heuristic_has_one(caplog: pytest.LogCaptureFixture) -> None:
    """Of bags and sequences in several modules, with more or less memory than they need."""
    caplog.set_level("ERROR")  # the cost model warns of the same things for every task
    solved = {"search": 0, "heuristics": 0}
    drawn = (stress_task(seed) for seed in itertools.count(FIRST_MIXED))
    small = (task for task in drawn if len(task.tables) * task.topology.world_size <= 40)
    for number, task in enumerate(itertools.islice(map(with_profiles, small), NUM_TASKS)):
        name = MODELS[number % len(MODELS)]
        plan = found(searcher(name, seed=number, patience=0, time_budget_s=None), task)
        others = [found(GreedySharder("size"), task), found(RandomSharder(seed=number), task)]
        has_other = any(other is not None for other in others)
        assert plan is not None or not has_other, task
        solved["heuristics"] += has_other
        if plan is not None:
            solved["search"] += 1
            validate(plan, task)
            cost_ms = predicted(plan.shards, task, model_of(name)).cost_ms
            assert cost_ms >= lower_bound_ms(model_of(name).cost_task(task)) * (1 - ROUNDING)
    assert solved["heuristics"] > NUM_TASKS / 4
    assert solved["search"] > solved["heuristics"] + NUM_TASKS / 10


SCRIPT = """
import json, sys
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.plans.task import read_task
from tests.unit.search.synthetic import searcher
sharder = searcher(**json.loads(sys.argv[2]))
print(sharder.shard(with_profiles(read_task(sys.argv[1]))).shards)
"""


@pytest.mark.slow
def test_the_same_in_another_process(tmp_path: Path) -> None:
    task = task_of(draw_tables(dlrm_datasets_pool(), num_tables=30, seed=1), 4, 4 * GIB, 65_536)
    first, second, third = (table.name for table in task.tables[:3])
    keys = {
        "apart": [[first, second]],
        "pin": {third: [0, 1]},
        "seed": 3,
        "patience": 2,
        "time_budget_s": None,
    }
    write_json(tmp_path / "task.json", task.to_json())
    here = searcher(**keys).shard(with_profiles(read_task(tmp_path / "task.json")))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "task.json"), json.dumps(keys)]
    for hash_seed in ("0", "1234"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == f"{here.shards}\n"


WIDE = task_of(tables_of(*[(1000, 2048, 3.0)] * 9, (400, 64, 20.0)), 4, 18_900_000, 1024)


def test_one_clock_limits_all_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a second; `test_find_plan` says what happens between looks."""
    looks = itertools.count()
    fake = SimpleNamespace(perf_counter=lambda: float(next(looks)))
    monkeypatch.setattr("dlrm_sharded.search.stopping.time", fake)
    budget_s = 200
    plan = searcher(time_budget_s=budget_s, patience=10**6).shard(with_profiles(WIDE))
    assert budget_s <= next(looks) < budget_s + 50
    validate(plan, WIDE)


class OnlyPredicts:
    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        raise NotImplementedError


@pytest.mark.parametrize("model", [None, OnlyPredicts()], ids=["none", "only_predicts"])
def test_needs_a_cost_model_with_unit_costs(model: CostModel | None) -> None:
    with pytest.raises(ConfigError, match=r"needs a cost model with a method `cost_task`; choose"):
        SearchSharder(SharderContext(cost_model=model))


@pytest.mark.parametrize(
    ("conversion_ms", "gains"), [(0.0, True), (100.0, False)], ids=["free", "costly"]
)
def test_a_plan_in_a_stated_precision_is_costed_and_bounded_in_it(
    conversion_ms: float, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are converted in so many ms per MB."""
    monkeypatch.setitem(CPU_CONVERSIONS, "fp16", ConversionTimes(*(conversion_ms,) * 5))
    task = with_profiles(task_of(tables_of(*[(1000, 64, 2.0)] * 6), 3, 10**7, 4096))
    model = model_of("plain")
    sharder = SearchSharder(
        SharderContext(cost_model=model),
        Constraints(replicate="never"),  # replicas exchange no vectors
        exchange_precision="fp16",
        time_budget_s=0.4,
    )
    plan, report = Planner(sharder, model).plan(task)
    assert plan.exchange_precision == report.exchange_precision == ExchangePrecision.parse("fp16")
    exact = dataclasses.replace(plan, exchange_precision=FP32_EXCHANGE)
    assert (report.cost.cost_ms < model.predict(exact, task).cost_ms) == gains
    assert report.gap >= -1e-7


def test_a_stated_precision_is_that_of_the_plan() -> None:
    task = with_profiles(task_of(tables_of(*[(1000, 64, 2.0)] * 3), 2, 10**7, 1024))
    stated = searcher("plain", exchange_precision={"forward": "fp16", "backward": "fp32"})
    assert stated.shard(task).exchange_precision == ExchangePrecision("fp16", "fp32")
    assert searcher("plain").exchange_precision is None
