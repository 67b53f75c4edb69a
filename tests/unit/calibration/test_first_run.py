"""What a first run learns of made-up hardware, and that jobs take turns."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_fit import fit_samples
from dlrm_sharded.calibration.sample_store import sample_store
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.job import first_run
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from tests.processes import lock_of_another_process
from tests.unit.calibration.made_up_bench import MadeUpBench, true_prices
from tests.unit.hardware.made_up import CPU
from tests.unit.made_up import in_turns, tables_of, task_of

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 2)
SLOW = "forward x 2, backward x 5.5, launches x 4, exchanges x 3"
RANKS = 2


@pytest.fixture(scope="module")
def packaged() -> LearnedCostModel:
    return dataclasses.replace(
        learned_cost_model(RunContext()), standing=Standing("prior", "cpu: y")
    )


@pytest.fixture(scope="module")
def task() -> ShardingTask:
    rng = np.random.default_rng(0)
    shapes = [
        (int(rng.integers(1000, 10**6)), int(2 ** rng.integers(3, 8)), float(rng.integers(1, 40)))
        for _ in range(20)
    ]
    return task_of(tables_of(*shapes), RANKS, batch_size=2048)


def test_learns_every_stage_of_slow_hardware(
    packaged: LearnedCostModel, task: ShardingTask
) -> None:
    """Two directions, launches and exchanges that are slower by other factors, and 5 % noise."""
    true = true_prices(packaged, SLOW)
    samples = MadeUpBench(true, seed=1).first_run(task.tables, task.batch_size)
    assert 20 < len(samples) < 100
    measured = fit_samples(packaged, samples).model
    for of_task in (task, task_of(tables_of(*[(100, 4, 0.5)] * 2), RANKS, batch_size=2048)):
        plan = in_turns(of_task)
        found, expected, before = (
            model.predict(plan, of_task) for model in (measured, true, packaged)
        )
        for stage in STAGES:
            assert found.stage_max_ms(stage) == pytest.approx(
                expected.stage_max_ms(stage), rel=0.15
            ), stage
            assert before.stage_max_ms(stage) < 0.6 * expected.stage_max_ms(stage)


def test_covers_the_widths_of_the_tables(packaged: LearnedCostModel) -> None:
    """A single wide table among many is measured, and its costs are extrapolated no more."""
    shapes = [(100_000, 64, 10.0)] * 15 + [(50_000, 2048, 5.0)]
    task = task_of(tables_of(*shapes), RANKS, batch_size=1024)
    bench = MadeUpBench(true_prices(packaged, SLOW), seed=1)
    measured = fit_samples(packaged, bench.first_run(task.tables, task.batch_size)).model
    workload = workload_of_plan(in_turns(task), task)
    assert any("columns of a shard" in text for text in packaged.beyond_range(workload))
    assert not any("columns of a shard" in text for text in measured.beyond_range(workload))
    assert measured.ranges["columns of a shard"][1] == 2048


def test_a_job_that_hangs_in_its_measurement_delays_others_for_a_limited_time(
    tmp_path: Path, rank: Rank, task: ShardingTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They plan without measured costs then, and do not measure beside it."""
    monkeypatch.setattr(first_run, "_needs_measuring", lambda *_, **__: True)
    monkeypatch.setattr(first_run, "TURN_S", 0.2)
    lock = sample_store(HERE, str(tmp_path)).path.with_suffix(".measuring")
    planners = [object()]
    with lock_of_another_process(lock):
        found = first_run.after_first_run(
            planners,
            rank,
            HERE,
            task,
            budget_s=0.2,
            journal=str(tmp_path),
            new_planners=pytest.fail,
        )
    assert found is planners
