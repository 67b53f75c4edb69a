"""Prices on hardware they are not of: before and after runs, and after calibrations.

The packaged model is taken for a prior. Runs on some tasks correct it, and on other tasks the plans
of every stage of knowledge are measured beside those of TorchRec's planner, each rank's lookups by
themselves, on the same ids, in interleaved rounds. Switches of the libraries make this machine
another one, such as FBGEMM_ENABLE_INSTRUCTIONS=AVX2 with ATEN_CPU_CAPABILITY=avx2, and so do other
numbers of threads, a core that is shared (`taskset -c 0`, beside a busy process), and `--scaled`,
which multiplies what is measured. A first start measures here, too. `made_up` has all of this on
kinds of hardware where nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import measured
from benchmarks.figures import costs_of, prices_table, task_of
from benchmarks.made_up_hardware import HOME
from benchmarks.measured import OPTIMIZER, open_bench, predicted_compute_ms, task_rows
from benchmarks.planners import neuroshard, on_device, planners_of
from benchmarks.scaled_hardware import (
    Factors,
    ScaledBench,
    calibrated,
    scaled_start,
    stage_factors,
)
from dlrm_sharded.calibration.start_measurement import measure_first_start
from dlrm_sharded.cost.expected_maximum import with_expected_excess
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_cost_model
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.fitting.picture import START_S, corrected
from dlrm_sharded.fitting.run_journal import measured_run
from dlrm_sharded.fitting.samples import Sample
from dlrm_sharded.fitting.start_file import with_start
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.sharders.planning import Planner
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
REFERENCE = "torchrec"
RUN_SEED = 1000
"""Seed of the tasks of the runs, which are none of those that plans are compared on."""

FIRST_START = "first start"

Measure = Callable[..., list[Row]]
"""`task_rows` on this machine."""

OPTIONS = {
    "tasks": option(8, "tasks to compare on"),
    "runs": option((1, 3, 10), "numbers of runs after which prices are compared"),
    "calibrated": option(
        (),
        "calibrations here as NAME=FILE, the most thorough one last; an artefact, or a "
        "costs.parquet, which is fitted with the factors of --scaled",
        nargs="*",
    ),
    "scaled": option(
        HOME, "factors of this machine's times, such as 'backward x 5.5, forward x 2'"
    ),
    "plans": option(
        (), "plans of others as NAME=FOLDER, where each task's is NUMBER.json", nargs="*"
    ),
    "sharders": option((), "further yamls of conf/sharder, with the packaged prices", nargs="*"),
    "threads": option(1, "threads of a rank"),
    **{name: measured.OPTIONS[name] for name in ("seed", "rounds", "iterations")},
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    yield Case("prices", functools.partial(_rows, options))


def _rows(options: argparse.Namespace) -> list[Row]:
    factors = stage_factors(options.scaled)
    build = functools.partial(ScaledBench, factors=factors)
    with open_bench(
        options.iterations, table_bytes=MEASURED_RANK_BYTES, threads=options.threads, build=build
    ) as (bench, device):
        context = RunContext(device.type, local_hardware(device), OPTIMIZER, ranks_per_host=1)
        measure = functools.partial(task_rows, bench=bench, rounds=options.rounds)
        assert context.hardware is not None
        print("\n".join(context.hardware.lines()), flush=True)
        prior = shipped_cost_model(context)
        runs = _runs(prior, measure, max(options.runs), device.type)
        models = {"0 runs": prior, FIRST_START: _started(prior, context, factors)}
        models |= {f"{n} runs": corrected(prior, runs[:n]) for n in options.runs}
        for name, path in map(_name_and_path, options.calibrated):
            models[name] = calibrated(path, context, factors)
        packaged = functools.partial(planners_of, device=device.type, hardware=context.hardware)
        planners = packaged(options.sharders)
        planners |= {name: _planner(model) for name, model in models.items()}
        planners |= packaged([REFERENCE])
        rows: list[Row] = []
        for number, found in enumerate(measured_tasks(options.seed, num=options.tasks)):
            task = on_device(found.task, device.type)
            rng = np.random.default_rng([options.seed, number])
            given = {
                name: Planner(PlanFileSharder(Path(folder, f"{number}.json")), prior)
                for name, folder in map(_name_and_path, options.plans)
            }
            rows += measure(number, task, given | planners, rng=rng)
            _predict_reference(rows[-1], task, models)
            print(f"task {number}: {_figures(rows, number)}", flush=True)
    stated = {name: model.standing.error for name, model in models.items() if model.standing}
    return [
        row | {"stated": stated.get(row["sharder"])} if row["sharder"] in models else row
        for row in rows
    ]


def _predict_reference(
    row: Row, task: ShardingTask, models: Mapping[str, LearnedCostModel]
) -> None:
    """Note what all prices predict of TorchRec's plan, which none of them has chosen."""
    if "plan" in row:
        plan = _plan_of(row, task)
        row["predicted_by"] = {
            name: predicted_compute_ms(
                with_expected_excess(
                    model.predict(plan, task), model.standing.rank_error if model.standing else None
                )
            )
            for name, model in models.items()
        }


def _name_and_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    return name, path


def _started(prior: LearnedCostModel, context: RunContext, factors: Factors) -> LearnedCostModel:
    """Return the prices after a first start on this machine, with a single rank."""
    [found] = measured_tasks(RUN_SEED, num=1)
    tables, batch_size = on_device(found.task, context.device).tables, found.task.batch_size
    with process_group() as rank:
        start = measure_first_start(rank, context, tables, batch_size, budget_s=START_S)
    assert start is not None, "20 s are enough for some plans"
    print(f"first start: stated error {start.error:.2f}; beside {start.disturbance}", flush=True)
    return with_start(prior, scaled_start(start, prior, factors), num_ranks=1)


def _planner(model: LearnedCostModel) -> Planner:
    return Planner(neuroshard(model), model)


def _runs(prior: LearnedCostModel, measure: Measure, num_runs: int, device: str) -> list[Sample]:
    """Measure plans as runs do, each made with the prices that the runs before it corrected."""
    runs: list[Sample] = []
    for number, found in enumerate(measured_tasks(RUN_SEED, num=num_runs)):
        task, model = on_device(found.task, device), corrected(prior, runs)
        rng = np.random.default_rng([RUN_SEED, number])
        [row] = measure(number, task, {"run": _planner(model)}, rng=rng)
        runs.append(_as_run(row, task, prior))
        print(f"run {number}: {row['compute_ms']:.1f} ms, {row['predicted_compute_ms']:.1f} before")
    return runs


def _as_run(row: Row, task: ShardingTask, prior: LearnedCostModel) -> Sample:
    """Return a measured row as a run, whose ids are redistributed as the prior has it.

    On this machine exchanges are not measured, so they are as the prior has them, too.
    """
    plan = _plan_of(row, task)
    predicted = prior.predict(plan, task)
    measured = PlanCost.from_json(row["measured"])
    cost = dataclasses.replace(measured, input_dist_ms=predicted.input_dist_ms)
    run = measured_run(plan, task, cost)
    assert run is not None, "the tasks have one host"
    return run


def _plan_of(row: Row, task: ShardingTask) -> ShardingPlan:
    return ShardingPlan.from_json({"world_size": task.topology.world_size, "shards": row["plan"]})


def _figures(rows: Sequence[Row], number: int) -> str:
    return ", ".join(
        f"{row['sharder']} {row['compute_ms']:.2f}" for row in rows if row["number"] == number
    )


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write errors of predictions, and costs of plans over TorchRec's, the last model's, the best.

    The imbalance is the time of the slowest rank over the mean of the ranks. What is predicted of
    the chosen plan over its measured time is also compared with the same ratio of TorchRec's plan,
    so that what is common to a task, such as the machine's drift, cancels.
    """
    costs = costs_of(rows, "compute_ms")
    unchosen = {
        (name, task_of(row)): predicted_ms / row["compute_ms"]
        for row in rows
        for name, predicted_ms in row.get("predicted_by", {}).items()
    }
    last = next(name for name in reversed(costs) if name != REFERENCE)
    plans: list[Row] = []
    for row in rows:
        task = task_of(row)
        over = {other: costs[other][task] for other in (REFERENCE, last) if task in costs[other]}
        if "compute_ms" in row:
            over["the cheapest"] = min(
                of_task[task] for of_task in costs.values() if task in of_task
            )
            plan = {"prices": row["sharder"], "cost_ms": row["compute_ms"], "over": over}
            ranks_ms = [
                cost.computation_ms for cost in PlanCost.from_json(row["measured"]).per_rank
            ]
            plan["imbalance"] = max(ranks_ms) / float(np.mean(ranks_ms))
            if "stated" in row:
                plan |= {"predicted_ms": row["predicted_compute_ms"], "stated": row["stated"]}
                plan["unchosen"] = unchosen.get((row["sharder"], task))
            plans.append(plan)
    texts = ["the slowest rank, means over tasks [95 %]:", prices_table(plans, ["prices"])]
    if (error := repeatability(rows)) is not None:
        texts.append(
            f"a round predicts the other rounds of its plan with an error of {error:.1f} %"
        )
    return "\n\n".join(texts)


def repeatability(rows: Sequence[Row]) -> float | None:
    """Return the error of a plan's cost in a round, in percent, if it predicted the other rounds.

    No prediction can be expected to have a smaller one. It is None for a single round.
    """
    errors = []
    for row in rows:
        rounds = row.get("cost_rounds_ms", [])
        if len(rounds) > 1:
            others = [np.median(np.delete(rounds, i)) for i in range(len(rounds))]
            errors += [abs(ms / other - 1) for ms, other in zip(rounds, others, strict=True)]
    return 100 * float(np.mean(errors)) if errors else None
