"""Plans of the default search stay as close to the lower bound as they were, and others find none
that cost less in the mean."""

import contextlib
import dataclasses
import itertools
from statistics import mean

import pytest

from dlrm_sharded import InfeasibleTaskError, make_sharder
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.commands.sharders import planner_factory
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.task import ShardingTask
from tests.stress_tasks import stress_task
from tests.unit.commands.conftest import composed_config
from tests.unit.synthetic import mlperf_task, with_topology

pytestmark = pytest.mark.slow

RECORDED_GAP = 0.0169
"""Mean gap of these 20 tasks at 74764e8f, with the settings below, on a CPU (AMD EPYC).

The search is limited by rounds, so the speed of the machine does not matter.
"""

MLPERF_BATCH_SIZES = {8: 55_296, 16: 65_536, 64: 135_168}
H100 = Hardware(gpu_specs()["h100_sxm"].device_name)


def tasks() -> list[ShardingTask]:
    """Return 10 tasks of the paper, 7 with tight memory, and MLPerf's on 8, 16 and 64 GPUs."""
    on_cpus = [*TASK_SETS["paper"](0, num=10), *TASK_SETS["feasibility"](0, num=7)]
    on_gpus = [
        dataclasses.replace(mlperf_task(ranks), batch_size=size)
        for ranks, size in MLPERF_BATCH_SIZES.items()
    ]
    return [*(with_topology(one.task, compute_device="cpu") for one in on_cpus), *on_gpus]


def gap(task: ShardingTask) -> float:
    """Return the plan's predicted cost over its lower bound, less one."""
    limits = ("sharder.time_budget_s=null", "sharder.patience=3")
    cfg = composed_config("plan", "task=unused", "cost_model=learned", *limits)
    device = task.topology.compute_device
    hardware = H100 if device == "cuda" else None
    planner = planner_factory(cfg).planner(RunContext(device, hardware))
    _, report = planner.plan(with_profiles(task))
    assert report.gap is not None
    return report.gap


def test_the_mean_gap_is_at_most_a_point_above_the_recorded_one():
    gaps = [gap(task) for task in tasks()]
    assert len(gaps) == 20
    assert mean(gaps) <= RECORDED_GAP + 0.01, gaps


def test_small_stress_tasks_cost_no_more_than_by_the_best_other_sharder_in_the_mean():
    """Few tables on many ranks, wide beside busy ones, little memory."""
    drawn = (stress_task(seed) for seed in itertools.count(20_000))
    small = (task for task in drawn if len(task.tables) * task.topology.world_size <= 60)
    ratios = []
    for task in itertools.islice(small, 12):
        model = learned_cost_model(RunContext(device=task.topology.compute_device))
        costed = model.cost_task(task)
        costs_ms = {}
        for name in ("search", "dim", "lookup", "size_lookup", "torchrec"):
            options = {"time_budget_s": None} if name == "search" else {}
            with contextlib.suppress(InfeasibleTaskError):
                plan = make_sharder(name, model, **options).shard(costed.task)
                costs_ms[name] = costed.predict(plan).cost_ms
        if costs_ms:
            found_ms = costs_ms.pop("search")
            ratios += [found_ms / min(costs_ms.values())] if costs_ms else []
    assert len(ratios) > 6
    assert mean(ratios) <= 1.0, ratios
