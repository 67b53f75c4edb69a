"""Prices on hardware they are not of: before and after runs, and after calibrations.

The packaged model is taken for a prior. Runs on some tasks correct it, and on other tasks the plans
of every stage of knowledge are measured beside those of TorchRec's planner, each rank's lookups by
themselves, on the same ids, in interleaved rounds. Switches of the libraries make this machine
another one, such as FBGEMM_ENABLE_INSTRUCTIONS=AVX2 with ATEN_CPU_CAPABILITY=avx2, and so do other
numbers of threads, and a core that is shared: `taskset -c 0`, beside a busy process. A first start
measures here, too (`first_start` has it on kinds of made-up hardware).

With `--made-up`, the hardware is the packaged model with other speeds, and nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import measured
from benchmarks.figures import interval_text
from benchmarks.first_start import MadeUpBench
from benchmarks.measured import OPTIMIZER, open_bench, task_rows
from benchmarks.planners import on_device, planner_of
from dlrm_sharded.calibration.first_start import adapted_to
from dlrm_sharded.calibration.start_measurement import measure_first_start
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.learned import (
    LearnedCostModel,
    learned_cost_model,
    shipped_cost_model,
    shipped_prior,
)
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.fitting.from_prior import adapted
from dlrm_sharded.fitting.picture import START_S, corrected
from dlrm_sharded.fitting.run_journal import measured_run
from dlrm_sharded.fitting.samples import Sample
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES, PlanCost
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder
from dlrm_sharded.sharders.planning import Planner
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "measured"
REFERENCE = "torchrec"
RUN_SEED = 1000
"""Seed of the tasks of the runs, which are none of those that plans are compared on."""


NOISE = 0.05
"""Relative noise of a time on made-up hardware."""

FIRST_START = "first start"

Start = Callable[[LearnedCostModel, Sequence[Table], int], Sequence[Sample]]
"""Measures a first start under a prior, of some tables and a batch."""

Measure = Callable[[Mapping[str, Planner], int, ShardingTask, np.random.Generator], list[Row]]
"""Plans a task of some number with every planner, and measures the plans."""


OPTIONS = {
    "tasks": option(8, "tasks to compare on"),
    "runs": option((1, 3, 10), "numbers of runs after which prices are compared"),
    "calibrated": option(
        (), "artefacts of calibrations here as NAME=FILE, the most thorough one last", nargs="*"
    ),
    "made_up": option(
        float,
        "factors of the packaged model's times on hardware that is made up",
        nargs=3,
        metavar=("FORWARD", "BACKWARD", "EXCHANGES"),
    ),
    "threads": option(1, "threads of a rank"),
    **{name: measured.OPTIONS[name] for name in ("seed", "rounds", "iterations")},
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    yield Case("prices", functools.partial(_rows, options))


def _rows(options: argparse.Namespace) -> list[Row]:
    with _hardware(options) as (context, measure, first_start):
        assert context.hardware is not None
        print("\n".join(context.hardware.lines()), flush=True)
        prior = shipped_cost_model(context)
        runs = _runs(prior, measure, max(options.runs), context.device)
        models = {"0 runs": prior}
        [found] = measured_tasks(RUN_SEED, num=1)
        task = on_device(found.task, context.device)
        models[FIRST_START] = _started(prior, first_start(prior, task.tables, task.batch_size))
        models |= {f"{n} runs": corrected(prior, runs[:n]) for n in options.runs}
        for calibrated in options.calibrated:
            name, _, path = calibrated.partition("=")
            models[name] = learned_cost_model(context, str(Path(path)))
        if options.made_up:
            models["true"] = _truth(options.made_up)
        planners = {name: _planner(model) for name, model in models.items()}
        planners[REFERENCE] = planner_of(
            REFERENCE, device=context.device, hardware=context.hardware
        )
        rows: list[Row] = []
        for number, found in enumerate(measured_tasks(options.seed, num=options.tasks)):
            task = on_device(found.task, context.device)
            rows += measure(planners, number, task, np.random.default_rng([options.seed, number]))
            print(f"task {number}: {_figures(rows, number)}", flush=True)
    stated = {name: model.standing.error for name, model in models.items() if model.standing}
    return [row | {"stated": stated.get(row["sharder"])} for row in rows]


def _started(prior: LearnedCostModel, samples: Sequence[Sample]) -> LearnedCostModel:
    """Return the prices after a first start, with its stated error."""
    found = adapted_to(prior, samples)
    standing = Standing(
        "measured", prior.name, error=found.stated_error, rank_error=found.rank_error
    )
    return dataclasses.replace(adapted(prior, samples), standing=standing)


@contextlib.contextmanager
def _hardware(options: argparse.Namespace) -> Iterator[tuple[RunContext, Measure, Start]]:
    """Yield this machine, or one that is made up, and how plans and first starts are measured."""
    if options.made_up:
        quiet()
        factors = ", ".join(f"{factor:g}" for factor in options.made_up)
        hardware = Hardware(f"made up: the packaged model times {factors}")
        truth = _truth(options.made_up)
        yield (
            RunContext("cpu", hardware, OPTIMIZER, 1),
            functools.partial(_made_up_rows, truth),
            MadeUpBench(truth, options.seed).first_start,
        )
        return
    with open_bench(
        options.iterations, table_bytes=MEASURED_RANK_BYTES, threads=options.threads
    ) as (bench, device):
        context = RunContext(device.type, local_hardware(device), OPTIMIZER, ranks_per_host=1)

        yield (
            context,
            lambda planners, number, task, rng: task_rows(
                number, task, planners, bench, rng, rounds=options.rounds
            ),
            functools.partial(_first_start, context),
        )


def _first_start(
    context: RunContext, prior: LearnedCostModel, tables: Sequence[Table], batch_size: int
) -> Sequence[Sample]:
    """Return what a first start measures on this machine, with a single rank."""
    with process_group() as rank:
        start = measure_first_start(rank, context, tables, batch_size, budget_s=START_S)
    assert start is not None, "20 s are enough for some plans"
    print(f"first start: stated error {start.error:.2f}; beside {start.disturbance}", flush=True)
    return start.samples


def _truth(factors: Sequence[float]) -> LearnedCostModel:
    """Return the packaged model with other speeds of the stages."""
    packaged = shipped_prior(RunContext())
    forward, backward, exchanges = factors
    return dataclasses.replace(
        packaged,
        compute=packaged.compute.scaled(forward, backward),
        communication=packaged.communication.scaled(dict.fromkeys(EXCHANGES, exchanges)),
        standing=None,
    )


def _made_up_rows(
    truth: LearnedCostModel,
    planners: Mapping[str, Planner],
    number: int,
    task: ShardingTask,
    rng: np.random.Generator,
) -> list[Row]:
    """Return rows as `task_rows` does; the cost counts as a whole, as exchanges are known, too."""
    rows: list[Row] = []
    for name, planner in planners.items():
        plan, found = planner.plan(task)
        assert found.cost is not None
        exact = truth.predict(plan, task)
        noisy = {
            stage: [
                rank.stage_ms(stage) * math.exp(NOISE * rng.standard_normal())
                for rank in exact.per_rank
            ]
            for stage in STAGES
        }
        row = {"number": number, "sharder": name, "plan": plan.to_json()["shards"]}
        row |= {"measured": exact.with_stages(noisy).to_json(), "compute_ms": exact.cost_ms}
        rows.append(row | {"predicted_compute_ms": found.cost.cost_ms})
    return rows


def _planner(model: LearnedCostModel) -> Planner:
    return Planner(NeuroShardSharder(SharderContext(cost_model=model)), model)


def _runs(prior: LearnedCostModel, measure: Measure, num_runs: int, device: str) -> list[Sample]:
    """Measure plans as runs do, each made with the prices that the runs before it corrected."""
    runs: list[Sample] = []
    for number, found in enumerate(measured_tasks(RUN_SEED, num=num_runs)):
        task, model = on_device(found.task, device), corrected(prior, runs)
        rng = np.random.default_rng([RUN_SEED, number])
        [row] = measure({"run": _planner(model)}, number, task, rng)
        runs.append(_as_run(row, task, prior))
        print(f"run {number}: {row['compute_ms']:.1f} ms, {row['predicted_compute_ms']:.1f} before")
    return runs


def _as_run(row: Row, task: ShardingTask, prior: LearnedCostModel) -> Sample:
    """Return a measured row as a run, whose ids are redistributed as the prior has it.

    On this machine exchanges are not measured, so they are as the prior has them, too.
    """
    plan = ShardingPlan.from_json({"world_size": task.topology.world_size, "shards": row["plan"]})
    predicted = prior.predict(plan, task)
    measured = PlanCost.from_json(row["measured"])
    cost = dataclasses.replace(measured, input_dist_ms=predicted.input_dist_ms)
    run = measured_run(plan, task, cost)
    assert run is not None, "the tasks have one host"
    return run


def _figures(rows: Sequence[Row], number: int) -> str:
    return ", ".join(
        f"{row['sharder']} {row['compute_ms']:.2f}" for row in rows if row["number"] == number
    )


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write errors of predictions, and costs of plans over TorchRec's and the last model's."""
    costs, predicted = (_by_task(rows, key) for key in ("compute_ms", "predicted_compute_ms"))
    stated = {row["sharder"]: row["stated"] for row in rows}
    best = next(name for name in reversed(costs) if name != REFERENCE)
    lines = []
    for name, found in costs.items():
        cells: list[object] = [None, None, None]
        if name != REFERENCE:
            over_measured = np.array([predicted[name][i] / found[i] for i in found])
            error = stated[name]
            cells = [
                float(np.exp(np.log(over_measured).mean())),
                100 * float(np.abs(over_measured - 1.0).mean()),
                None if error is None else 100 * error,
            ]
        for other in (REFERENCE, best):
            ratios = [found[i] / costs[other][i] for i in found if i in costs[other]]
            cells += [interval_text(ratios, ".3f"), f"{max(ratios):.3f}"]
        lines.append([name, *cells])
    errors_of = (
        Column("predicted / measured", ".2f"),
        Column("error, %", ".0f"),
        Column("stated, %", ".0f"),
    )
    ratios_to = (f"over {name}{worst}" for name in (REFERENCE, best) for worst in ("", ", worst"))
    table = TextTable(["prices", *errors_of, *ratios_to], lines).markdown()
    texts = ["the slowest rank, means over tasks [95 %]:", table]
    if (error := repeatability(rows)) is not None:
        texts.append(
            f"a round predicts the other rounds of its plan with an error of {error:.1f} %"
        )
    return "\n\n".join(texts)


def repeatability(rows: Sequence[Row]) -> float | None:
    """Return the error of a plan's cost in a round, in percent, if it predicted the other rounds.

    No prediction can be expected to have a smaller one. It is None where nothing is measured.
    """
    errors = []
    for row in rows:
        rounds = row.get("cost_rounds_ms", [])
        if len(rounds) > 1:
            others = [np.median(np.delete(rounds, i)) for i in range(len(rounds))]
            errors += [abs(ms / other - 1) for ms, other in zip(rounds, others, strict=True)]
    return 100 * float(np.mean(errors)) if errors else None


def _by_task(rows: Sequence[Row], key: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if key in row:
            found.setdefault(row["sharder"], {})[row["number"]] = row[key]
    return found
