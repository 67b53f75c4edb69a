"""result.json: its keys, and that what is written is what is read."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.plan_report import MadeFrom, PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.gpus import GpuState, GpuStates
from dlrm_sharded.ranks.machine_load import MachineLoad
from dlrm_sharded.runs.result import (
    METRICS,
    OBJECTIVES,
    RunResult,
    read_result,
    run_result,
    write_result,
)
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.step_choice import StepOptions
from dlrm_sharded.training.training_result import TrainingResult


def by_stage(
    fwd_compute: float, fwd_comm: float, bwd_comm: float, bwd_compute: float, name: str = "{}"
) -> dict[str, float]:
    """Times under the names of their stages."""
    times = {"fwd_compute": fwd_compute, "fwd_comm": fwd_comm}
    times |= {"bwd_comm": bwd_comm, "bwd_compute": bwd_compute}
    return {name.format(stage): ms for stage, ms in times.items()}


MEASURED = MeasuredCost(
    cost=PlanCost((StageCost(1.0, 2.0, 3.0, 4.0), StageCost(4.0, 3.0, 2.0, 0.0)), (0.5, 0.75)),
    spread={"fwd_compute": 0.1},
    iterations=20,
    launch_ms={"fwd_compute": 0.25, "fwd_comm": 0.125},
)
PREDICTED = PlanCost((StageCost(1.0, 2.5, 1.0, 1.0), StageCost(1.5, 1.0, 2.0, 1.75)), (0.5, 0.625))
PLAN = ShardingPlan(2, (Shard.whole(Table("a", 10, 8, 1.0), 0),))
PRIOR = CostProvenance("prior", "cpu: other", ("no AVX-512 here",), num_runs=2, error=0.25)
REPORT = PlanReport(
    "test",
    solve_s=0.5,
    cost=PREDICTED,
    lower_bound_ms=5.0,
    provenance=PRIOR,
    made_from=MadeFrom({}, "abc", None, None, {}),
)
UNPREDICTED = PlanReport("test", solve_s=0.5)
WITHOUT_IDS = dataclasses.replace(REPORT, cost=PlanCost(PREDICTED.per_rank))
MACHINE_LOAD = MachineLoad({"node1": 0.5, "node2": 1.5}, 1.7e9, 0.02)
TRAINING = TrainingResult(
    *(
        12,
        StepOptions("base", "none", False),
        10.0,
        6400.0,
        6000.0,
        5000.0,
        0.5,
        Evaluation(None, None, 0),
        0.25,
        MACHINE_LOAD,
    ),
    reserved_gib=0.5,
    ids_out_of_range={"film": 7},
)
PREDICTION = {
    "predicted_ms": 6.25,
    "predicted_critical_path_ms": 7.75,
    "predicted_stages_ms": by_stage(1.5, 2.5, 2.0, 1.75),
    "predicted_input_dist_ms": 0.625,
    "prices": "prior, corrected by 2 runs, within about 25 %",
    "prices_digest": "abc",
    "expected_error": 0.25,
    "lower_bound_ms": 5.0,
    "gap": 0.25,
}
"""Keys that a run without a cost model cannot know."""


def result_of(
    report: PlanReport = REPORT,
    training: TrainingResult = TRAINING,
    measured: MeasuredCost = MEASURED,
) -> RunResult:
    return run_result(
        *(PLAN, report, measured, training),
        **{"device": "cpu: test", "ranks_per_host": 1, "batch_size": 64, "seed": 3},
        interruptions=0,
    )


def written(folder: Path, result: RunResult) -> dict[str, Any]:
    write_result(folder, result)
    return json.loads((folder / "result.json").read_text())


def test_all_that_a_run_says(tmp_path):
    fields = written(tmp_path, result_of())
    assert fields.pop("versions").keys() >= {"python", "torch"}
    fields.pop("commit")
    assert fields == {
        **{"hosts": {"node1": 0.5, "node2": 1.5}, "began_s": 1.7e9, "core_wait": 0.02},
        "gpus": None,
        "sharder": "test",
        "costs": None,
        "ids_out_of_range": {"film": 7},
        **{"world_size": 2, "ranks_per_host": 1, "batch_size": 64},
        "device": "cpu: test",
        **{"pipeline": "base", "compile_mode": "none", "dense_graph": False},
        "embedding_cost_ms": 10.0,
        "critical_path_ms": 14.0,
        "stages_ms": by_stage(4.0, 3.0, 3.0, 4.0),
        "input_dist_ms": 0.75,
        "per_rank": [by_stage(1.0, 2.0, 3.0, 4.0, "{}_ms"), by_stage(4.0, 3.0, 2.0, 0.0, "{}_ms")],
        "imbalance": 10 / 9.5,
        "spread": {"fwd_compute": 0.1},
        "launch_ms": {"fwd_compute": 0.25, "fwd_comm": 0.125},
        "measured_iterations": 20,
        **PREDICTION,
        "plan_solve_s": 0.5,
        "samples_per_s": 6400.0,
        "samples_per_s_p10": 6000.0,
        "samples_per_s_overall": 5000.0,
        "step_ms": 10.0,
        "loss": 0.5,
        "auroc": None,
        "normalized_entropy": None,
        "peak_gib": 0.25,
        "reserved_gib": 0.5,
        "estimated_peak_gib": None,
        "steps": 12,
        "interruptions": 0,
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("report", "unknown"),
    [(REPORT, set()), (WITHOUT_IDS, {"predicted_input_dist_ms"}), (UNPREDICTED, {*PREDICTION})],
    ids=["predicted", "without_ids", "unpredicted"],
)
def test_what_is_written_is_read(report, unknown, tmp_path):
    """A cost model may predict the cost and not the redistribution of the ids."""
    result = result_of(report)
    assert read_result(tmp_path) is None
    fields = written(tmp_path, result)
    assert read_result(tmp_path) == result
    assert {key for key in PREDICTION if fields[key] is None} == unknown


def test_metrics():
    """One by one, with the stages of the slowest rank, which sum to its cost."""
    metrics = result_of().metrics
    assert tuple(metrics) == METRICS
    assert metrics["fwd_compute_ms"] == 4.0
    assert metrics["predicted_fwd_comm_ms"] == 2.5
    slowest = [value for name, value in metrics.items() if name.startswith("slowest_rank_")]
    assert slowest == [1.0, 2.0, 3.0, 4.0]
    assert {"versions", "steps", "seed", "world_size", "per_rank"}.isdisjoint(metrics)
    assert {"samples_per_s", "embedding_cost_ms", "loss", "auroc"} < set(OBJECTIVES) < set(METRICS)
    assert "predicted_ms" not in OBJECTIVES


def test_what_is_not_finite_is_null(tmp_path):
    """JSON has no NaN; other programs stop at it."""
    evaluation = Evaluation(auroc=math.inf, normalized_entropy=math.nan, num_samples=4)
    training = dataclasses.replace(TRAINING, evaluation=evaluation, loss=-math.inf)
    result = dataclasses.replace(result_of(training=training), spread={"a": math.nan})
    write_result(tmp_path, result)
    fields = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert fields["spread"] is None
    assert [fields[key] for key in ("loss", "auroc", "normalized_entropy")] == [None] * 3
    assert fields["per_rank"][0]["fwd_compute_ms"] == 1.0


def test_states_of_gpus(tmp_path):
    fast, hot = GpuState(1980, 2619, 0), GpuState(1500, 2619, 0x20)
    steady, slowed = (GpuStates(fast, fast),) * 2, (GpuStates(fast, hot),) * 2
    machine_load = dataclasses.replace(MACHINE_LOAD, gpus=slowed)
    result = result_of(
        training=dataclasses.replace(TRAINING, machine_load=machine_load),
        measured=dataclasses.replace(MEASURED, gpus=steady),
    )
    assert result.gpus == {"embedding_cost": steady, "training": slowed}
    gpus = written(tmp_path, result)["gpus"]
    assert gpus["training"][1]["after"] == {"sm_mhz": 1500, "memory_mhz": 2619, "reasons": 32}
    assert read_result(tmp_path) == result
