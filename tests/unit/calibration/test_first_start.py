"""The choice of a first start, what it learns of made-up hardware, and the file that keeps it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.first_start import Chooser, measure_plans
from dlrm_sharded.calibration.plan_sizes import CPU_SIZES
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.random_plans import MAX_COLS
from dlrm_sharded.calibration.sample_fit import fit_samples
from dlrm_sharded.calibration.sample_store import sample_store
from dlrm_sharded.calibration.start_plans import StartPlan, start_plans
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
LIMITS = dataclasses.replace(CPU_SIZES, table_gib=0.1, ids_per_step=100_000).rank_limits("sgd")
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


@pytest.fixture(scope="module")
def plans(task: ShardingTask) -> list[StartPlan]:
    batch = task.batch_size
    return start_plans(task.tables, batch, LIMITS, computing=RANKS, exchanging=RANKS)


def test_learns_every_stage_of_slow_hardware(
    packaged: LearnedCostModel, task: ShardingTask
) -> None:
    """Two directions, launches and exchanges that are slower by other factors, and 5 % noise."""
    true = true_prices(packaged, SLOW)
    samples = MadeUpBench(true, seed=1).first_start(packaged, task.tables, task.batch_size)
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
    """A single wide table among many is measured, and its prices are extrapolated no more."""
    shapes = [(100_000, 64, 10.0)] * 15 + [(50_000, 512, 5.0)]
    task = task_of(tables_of(*shapes), RANKS, batch_size=2048)
    samples = MadeUpBench(true_prices(packaged, SLOW), seed=1).first_start(
        packaged, task.tables, task.batch_size
    )
    measured = fit_samples(packaged, samples).model
    workload = workload_of_plan(in_turns(task), task)
    assert any("columns of a shard" in text for text in packaged.beyond_range(workload))
    assert not any("columns of a shard" in text for text in measured.beyond_range(workload))
    assert measured.ranges["columns of a shard"][1] == 512


@pytest.mark.parametrize("slowness", [1, 60, 200])
def test_keeps_to_its_time(
    packaged: LearnedCostModel, plans: list[StartPlan], slowness: int
) -> None:
    """Also on hardware on which all takes longer than the prior says; what is left is repeated."""
    factors = [f"{part} x {slowness}" for part in ("forward", "backward", "exchanges")]
    true, budget_s = true_prices(packaged, ", ".join(factors)), 15.0
    bench, attempts = MadeUpBench(true, seed=0), []

    def measure(plan: StartPlan, attempt: int) -> object:
        attempts.append((plan.number, attempt))
        return bench.measure_start(plan)

    chooser = Chooser.of_plans(packaged, plans, budget_s=budget_s, ranks_per_host=RANKS)
    measured = measure_plans(
        plans, chooser, measure, budget_s=budget_s, decide=lambda f: f(), clock=bench.clock
    )
    assert measured.seconds <= budget_s
    assert measured.num_measurements == len(attempts) == len(set(attempts)) > 1
    assert len(measured.samples) == len({number for number, _ in attempts})
    repeated = [attempt > 0 for _, attempt in attempts]
    assert repeated == sorted(repeated), "plans are repeated when the new ones are measured"
    if slowness == 1:
        kinds = {plans[number].name for number, _ in attempts}
        assert {"tiny", "exchange"} < kinds
        assert any(repeated)
        assert measured.change is not None
        assert 1.0 < measured.change < 1.2


def test_made_up_plans_are_of_the_tables(plans: list[StartPlan], task: ShardingTask) -> None:
    dims = {table.embedding_dim for table in task.tables}
    wide = [table for plan in plans if plan.name == "wide" for table in plan.tables]
    assert {table.num_cols for table in wide} == {max(dims)}
    for plan in plans:
        assert plan.batch_size % plan.world_size == 0
        for rank in range(plan.world_size):
            own = [t for t in plan.tables if t.rank in (rank, None)]
            assert sum(4 * t.num_rows * t.num_cols for t in own if t.rank == rank) < 0.12 * 2**30
    narrow = dataclasses.replace(LIMITS, wide_cols=MAX_COLS)
    assert LIMITS.wide_cols > MAX_COLS
    assert plans == start_plans(
        task.tables, task.batch_size, narrow, computing=RANKS, exchanging=RANKS
    )
    alone = start_plans(task.tables, 7, LIMITS, computing=1, exchanging=1)
    assert {plan.world_size for plan in alone} == {1}
    assert not {"exchange", "row blocks", "replicas"} & {plan.name for plan in alone}


def test_a_job_that_hangs_in_its_measurement_delays_others_for_a_limited_time(
    tmp_path: Path, rank: Rank, task: ShardingTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They plan without measured prices then, and do not measure beside it."""
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
