"""Prices on hardware they are not of: before and after runs, and after calibrations.

The packaged model is taken for a prior. Runs on some tasks correct it, and on other tasks the plans
of every stage of knowledge are measured beside those of TorchRec's planner, each rank's lookups by
themselves, on the same ids, in interleaved rounds. Switches of the libraries make this machine
another one, such as FBGEMM_ENABLE_INSTRUCTIONS=AVX2 with ATEN_CPU_CAPABILITY=avx2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.compared import Row, markdown, on_device, planner_of
from benchmarks.measured import task_rows
from benchmarks.shard_bench import OPTIMIZER, add_round_arguments, open_bench
from dlrm_sharded.artifact import cost_model_kind, find_artifact
from dlrm_sharded.calibration.picture import corrected
from dlrm_sharded.calibration.rank_bench import RankBench
from dlrm_sharded.calibration.run_journal import measured_run
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.context import RunContext
from dlrm_sharded.cost.learned import KIND, LearnedCostModel, learned_cost_model
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import STAGES, PlanCost
from dlrm_sharded.planning import Planner
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder
from dlrm_sharded.task import ShardingTask

REFERENCE = "torchrec"
RUN_SEED = 1000
"""Seed of the tasks of the runs, which are none of those that plans are compared on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=int, default=8, help="tasks to compare on [%(default)s]")
    parser.add_argument(
        "--runs",
        type=int,
        nargs="+",
        default=[1, 3, 10],
        help="numbers of runs after which prices are compared [%(default)s]",
    )
    parser.add_argument(
        "--calibrated",
        nargs="*",
        default=[],
        metavar="NAME=FILE",
        help="artefacts of calibrations on this hardware, the most thorough one last",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, ids and order")
    add_round_arguments(parser, rounds=3, item="rank")


def run(options: argparse.Namespace) -> None:
    with open_bench(options.iterations, table_bytes=MEASURED_RANK_BYTES) as (bench, device):
        hardware = local_hardware(device)
        print("\n".join(hardware.lines()), flush=True)
        context = RunContext(device.type, hardware, OPTIMIZER, ranks_per_host=1)
        packaged = find_artifact(cost_model_kind(KIND), hardware, device.type, shipped_only=True)
        prior = learned_cost_model(context, str(packaged))
        runs = _runs(prior, bench, max(options.runs), device.type)
        models = {"0 runs": prior}
        models |= {f"{n} runs": corrected(prior, runs[:n]) for n in options.runs}
        for calibrated in options.calibrated:
            name, _, path = calibrated.partition("=")
            models[name] = learned_cost_model(context, str(Path(path)))
        planners = {name: _planner(model) for name, model in models.items()}
        planners[REFERENCE] = planner_of(REFERENCE, device=device.type, hardware=hardware)
        rows: list[Row] = []
        for number, found in enumerate(measured_tasks(options.seed, num=options.tasks)):
            task = on_device(found.task, device.type)
            rng = np.random.default_rng([options.seed, number])
            rows += task_rows(number, task, planners, bench, rng, rounds=options.rounds)
            print(f"task {number}: {_figures(rows, number)}", flush=True)
    report(rows, models)


def _planner(model: LearnedCostModel) -> Planner:
    return Planner(NeuroShardSharder(SharderContext(cost_model=model)), model)


def _runs(prior: LearnedCostModel, bench: RankBench, num_runs: int, device: str) -> list[Sample]:
    """Measure plans as runs do, each made with the prices that the runs before it corrected."""
    runs: list[Sample] = []
    for number, found in enumerate(measured_tasks(RUN_SEED, num=num_runs)):
        task, model = on_device(found.task, device), corrected(prior, runs)
        rng = np.random.default_rng([RUN_SEED, number])
        [row] = task_rows(number, task, {"run": _planner(model)}, bench, rng, rounds=1)
        runs.append(_as_run(row, task, prior))
        print(f"run {number}: {row['compute_ms']:.1f} ms, {row['predicted_compute_ms']:.1f} before")
    return runs


def _as_run(row: Row, task: ShardingTask, prior: LearnedCostModel) -> Sample:
    """Return a measured row as a run; exchanges, which are not measured, are as the prior has them.

    So runs correct the computation alone.
    """
    plan = ShardingPlan.from_json({"world_size": task.topology.world_size, "shards": row["plan"]})
    measured, predicted = PlanCost.from_json(row["measured"]), prior.predict(plan, task)
    cost = PlanCost.from_stages(
        {
            stage: [
                (ours if stage.endswith("comm") else theirs).stage_ms(stage)
                for ours, theirs in zip(predicted.per_rank, measured.per_rank, strict=True)
            ]
            for stage in STAGES
        },
        input_dist_ms=predicted.input_dist_ms,
    )
    run = measured_run(plan, task, cost)
    assert run is not None, "the tasks have one host"
    return run


def _figures(rows: Sequence[Row], number: int) -> str:
    return ", ".join(
        f"{row['sharder']} {row['compute_ms']:.2f}" for row in rows if row["number"] == number
    )


def report(rows: Sequence[Row], models: Mapping[str, LearnedCostModel]) -> None:
    """Print errors of predictions, and costs of plans over TorchRec's and the last model's."""
    best = list(models)[-1]
    lines = []
    for name in (*models, REFERENCE):
        costs = _by_task(rows, name, "compute_ms")
        cells: list[object] = [name]
        if name in models:
            predicted = _by_task(rows, name, "predicted_compute_ms")
            errors = [abs(predicted[i] / costs[i] - 1) for i in costs]
            standing = models[name].standing
            stated = None if standing is None else standing.error
            cells += [f"{100 * float(np.mean(errors)):.0f}"]
            cells += ["-" if stated is None else f"{100 * stated:.0f}"]
        else:
            cells += ["-", "-"]
        for reference in (REFERENCE, best):
            others = _by_task(rows, reference, "compute_ms")
            ratios = [costs[i] / others[i] for i in costs if i in others]
            cells += [f"{math.exp(np.mean(np.log(ratios))):.3f}", f"{max(ratios):.3f}"]
        lines.append(cells)
    header = ["prices", "error, %", "stated, %"]
    header += [
        f"cost over {name}{worst}" for name in (REFERENCE, best) for worst in ("", ", worst")
    ]
    print("\ncomputation of the slowest rank, geometric means over tasks:\n")
    print(markdown(header, lines))


def _by_task(rows: Sequence[Row], sharder: str, key: str) -> dict[int, float]:
    return {row["number"]: row[key] for row in rows if row["sharder"] == sharder and key in row}
