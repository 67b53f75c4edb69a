"""What a first run learns of synthetic hardware, and that jobs take turns."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.drawn_plans import draw_plan
from dlrm_sharded.calibration.plan_limits import PlanLimits
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_fit import fit_samples
from dlrm_sharded.calibration.sample_store import sample_store
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.job import first_measurement
from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from tests.processes import lock_of_another_process
from tests.unit.hardware.synthetic import CPU
from tests.unit.synthetic import in_turns, tables_of, task_of

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 2)
LIMITS = PlanLimits(table_bytes=2**29, ids_per_step=300_000, vector_bytes=10**8)
RANKS, NUM_PLANS = 2, 30


@pytest.fixture(scope="module")
def packaged() -> LearnedCostModel:
    return dataclasses.replace(
        learned_cost_model(RunContext()), provenance=CostProvenance("prior", "cpu: y")
    )


@pytest.fixture(scope="module")
def task() -> ShardingTask:
    rng = np.random.default_rng(0)
    shapes = [
        (int(rng.integers(1000, 10**6)), int(2 ** rng.integers(3, 8)), float(rng.integers(1, 40)))
        for _ in range(20)
    ]
    return task_of(tables_of(*shapes), RANKS, batch_size=2048)


def slow(packaged: LearnedCostModel) -> LearnedCostModel:
    """Hardware on which two directions, launches and exchanges are slower by other factors."""
    launches = slice(len(packaged.compute.device.terms), len(packaged.compute.device.terms) + 2)
    directions = [np.full(packaged.compute.num_parts, factor) for factor in (2.0, 5.5)]
    for of_parts in directions:
        of_parts[launches] = 4.0
    return dataclasses.replace(
        packaged,
        compute=packaged.compute.scaled(*directions),
        communication=packaged.communication.scaled(dict.fromkeys(EXCHANGES, 3.0)),
        provenance=None,
    )


def first_run_on(true: LearnedCostModel, of: ShardingTask) -> list[Sample]:
    """Plans of the tables of a task, measured on two and four ranks with 5 % noise."""
    rng, samples = np.random.default_rng(1), []

    def noisy(times_ms: Iterable[float]) -> list[float]:
        return [ms * float(np.exp(0.05 * rng.standard_normal())) for ms in times_ms]

    for number in range(NUM_PLANS):
        drawn = draw_plan(
            number,
            np.random.default_rng([0, number]),
            LIMITS,
            batch_sizes=(of.batch_size, of.batch_size // 4),
            computing=2,
            exchanging=(4,),
            tables=of.tables,
        )
        plan, task = drawn.as_plan("cpu", 4)
        hosts = Hosts(plan.world_size, plan.world_size)
        cost = true.predict_workload(workload_of_plan(plan, task), hosts)
        stages = {s: noisy(rank.stage_ms(s) for rank in cost.per_rank) for s in STAGES}
        measured = PlanCost.from_stages(stages, input_dist_ms=noisy(cost.input_dist_ms or ()))
        samples.append(Sample.of_plan(plan, task, measured, kind=drawn.kind, number=number))
    return samples


def test_learns_every_stage_of_slow_hardware(
    packaged: LearnedCostModel, task: ShardingTask
) -> None:
    true = slow(packaged)
    measured = fit_samples(packaged, first_run_on(true, task)).model
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
    measured = fit_samples(packaged, first_run_on(slow(packaged), task)).model
    workload = workload_of_plan(in_turns(task), task)
    assert any("columns of a shard" in text for text in packaged.beyond_range(workload))
    assert not any("columns of a shard" in text for text in measured.beyond_range(workload))
    assert measured.ranges["columns of a shard"][1] == 2048


def test_a_job_that_hangs_in_its_measurement_delays_others_for_a_limited_time(
    tmp_path: Path, rank: Rank, task: ShardingTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They plan without measured costs then, and do not measure at the same time."""
    monkeypatch.setattr(first_measurement, "needs_measuring", lambda *_, **__: True)
    monkeypatch.setattr(first_measurement, "TURN_S", 0.2)
    lock = sample_store(HERE, str(tmp_path)).path.with_suffix(".measuring")
    planner: Any = SimpleNamespace(uses_costs=True, cost_model=None)
    with lock_of_another_process(lock):
        found = first_measurement.with_measured_costs(
            planner, rank, HERE, task, budget_s=0.2, journal=str(tmp_path), new_planner=pytest.fail
        )
    assert found is planner
