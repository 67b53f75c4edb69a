"""The choice of a first start, what it learns of made-up hardware, and the file that keeps it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_sharded import RunContext
from dlrm_sharded.calibration.first_start import Chooser, measure_plans
from dlrm_sharded.calibration.hardware_costs import (
    conditions_of,
    corrected,
    hardware_cost_model,
    needs_start,
)
from dlrm_sharded.calibration.plan_sizes import CPU_SIZES
from dlrm_sharded.calibration.random_plans import MAX_COLS
from dlrm_sharded.calibration.samples import workload_of_sample
from dlrm_sharded.calibration.start_file import (
    FirstStart,
    find_start,
    start_folder,
    start_path,
    with_start,
    write_start,
)
from dlrm_sharded.calibration.start_plans import StartPlan, start_plans
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.job import first_start
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from tests.processes import lock_of_another_process
from tests.unit.calibration.made_up_bench import MadeUpBench, true_prices
from tests.unit.calibration.test_adapt import on_other_hardware
from tests.unit.cost.hardware import measured_plans
from tests.unit.hardware.made_up import CPU
from tests.unit.made_up import in_turns, tables_of, task_of

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 2)
SLOW = "forward x 2, backward x 5.5, launches x 4, exchanges x 3"
LIMITS = dataclasses.replace(CPU_SIZES, table_gib=0.1, ids_per_step=100_000).rank_limits("sgd")
SAMPLES = tuple(measured_plans(6, 3, seed=8))
RANKS = 2


@pytest.fixture(scope="module")
def packaged() -> LearnedCostModel:
    return dataclasses.replace(shipped_prior(RunContext()), standing=Standing("prior", "cpu: y"))


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


def start_of(**changes: Any) -> FirstStart:
    start = FirstStart(conditions_of(HERE), SAMPLES, seconds=19.0, error=0.12)
    return dataclasses.replace(start, **changes)


def test_learns_every_stage_of_slow_hardware(
    packaged: LearnedCostModel, task: ShardingTask
) -> None:
    """Two directions, launches and exchanges that are slower by other factors, and 5 % noise."""
    true = true_prices(packaged, SLOW)
    samples = MadeUpBench(true, seed=1).first_start(packaged, task.tables, task.batch_size)
    start = start_of(samples=tuple(samples))
    measured = with_start(packaged, start, num_ranks=RANKS)
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
    measured = with_start(packaged, start_of(samples=tuple(samples)), num_ranks=RANKS)
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


def test_is_found_under_its_conditions_alone(tmp_path: Path) -> None:
    start = start_of()
    write_start(start_path(tmp_path, HERE), start)
    found = find_start(HERE, [tmp_path / "none", tmp_path])
    assert found == dataclasses.replace(start, samples=found.samples)
    assert [s.to_row() for s in found.samples] == [s.to_row() for s in SAMPLES]
    other = dataclasses.replace(CPU, threads=CPU.threads + 1)
    for elsewhere in (
        dataclasses.replace(HERE, optimizer="adam"),
        dataclasses.replace(HERE, ranks_per_host=4),
        dataclasses.replace(HERE, fbgemm="1.9.0"),  # whose kernels have changed
        dataclasses.replace(HERE, hardware=Hardware("cpu: x", Fingerprint(other))),
        RunContext(),
    ):
        assert find_start(elsewhere, [tmp_path]) is None


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"format": 1, "samples": []}'])
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: str) -> None:
    path = write_start(start_path(tmp_path, HERE), start_of())
    path.write_text(damage)
    assert find_start(HERE, [tmp_path]) is None


def test_lookups_of_a_single_rank_serve_others(tmp_path: Path, packaged: LearnedCostModel) -> None:
    alone = dataclasses.replace(HERE, ranks_per_host=1)
    lookups = tuple(
        dataclasses.replace(
            s,
            world_size=1,
            ranks_per_host=1,
            shards=tuple(shard for shard in s.shards if shard.rank == 0),
            cost=PlanCost(s.cost.per_rank[:1], s.cost.input_dist_ms[:1]),
        )
        for s in SAMPLES[:2]
    )
    start = start_of(conditions=conditions_of(alone), samples=lookups)
    write_start(start_path(tmp_path, alone), start)
    assert find_start(HERE, [tmp_path], may_lack_exchanges=False) is None
    found = find_start(HERE, [tmp_path])
    assert found is not None
    standing = with_start(packaged, found, num_ranks=2).standing
    assert standing.error is None, "nobody knows how far exchanges are off"
    assert "exchanges were not measured" in standing.reasons
    assert with_start(packaged, found, num_ranks=1).standing.error == 0.12


def test_measured_prices_say_what_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DLRM_SHARDED_CACHE", str(tmp_path))
    before = hardware_cost_model(HERE, calibrate="auto")
    assert before.standing.kind == "prior"
    assert needs_start(before, HERE)
    write_start(start_path(start_folder(), HERE), start_of())
    caplog.clear()
    after = hardware_cost_model(HERE, calibrate="auto")
    assert after.standing.short_text == "measured at the first start (19 s), within about 12 %"
    assert not needs_start(after, HERE)
    assert "is a prior" not in caplog.text
    assert after.standing.to_json()["kind"] == "measured"
    assert hardware_cost_model(HERE, calibrate="never").standing == before.standing
    [file] = (Path(__file__).parents[3] / "dlrm_sharded" / "artifacts").glob("learned-cpu*")
    assert hardware_cost_model(HERE, str(file), calibrate="auto").standing.kind == "prior", (
        "as it is named"
    )


def test_runs_correct_measured_prices(packaged: LearnedCostModel) -> None:
    """By the rule of calibrated ones: runs must contradict them."""
    measured = with_start(packaged, start_of(), num_ranks=2)
    [run, *_] = SAMPLES
    predicted = measured.predict_workload(workload_of_sample(run), run.hosts)
    near = on_other_hardware([dataclasses.replace(run, cost=predicted)], 1.1)
    assert corrected(measured, near) is measured
    slower = corrected(measured, on_other_hardware(SAMPLES, 4.0))
    assert slower.standing.short_text.startswith(
        "measured at the first start (19 s), corrected by 9 runs, within about"
    )


@pytest.mark.parametrize("key", ["error", "rank_error", "seconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_file_with_absurd_figures_counts_as_none(tmp_path: Path, key: str, value: float) -> None:
    path = write_start(start_path(tmp_path, HERE), start_of())
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert find_start(HERE, [tmp_path]) is None


def test_a_job_that_hangs_in_its_measurement_delays_others_for_a_limited_time(
    tmp_path: Path, rank: Rank, task: ShardingTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They plan without measured prices then, and do not measure beside it."""
    monkeypatch.setenv("DLRM_SHARDED_CACHE", str(tmp_path))
    monkeypatch.setattr(first_start, "may_need", lambda *_, **__: True)
    monkeypatch.setattr(first_start, "TURN_S", 0.2)
    lock = start_path(start_folder(), HERE).with_suffix(".lock")
    lock.parent.mkdir()
    planner = object()
    with lock_of_another_process(lock):
        found = first_start.with_first_start(
            planner, rank, HERE, task, budget_s=0.2, new_planner=pytest.fail
        )
    assert found is planner
