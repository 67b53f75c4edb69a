"""Measured costs of the plans of several sharders, beside the costs that the model predicts.

Each rank's shards are looked up by themselves on one core of this machine, and communication has
its predicted time. The tasks come from `measured_tasks`, and their accesses have the Zipf exponent
that the model assumes.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.compared import (
    add_row_arguments,
    add_sharder_arguments,
    compare,
    costs_of,
    interval_text,
    markdown,
    on_device,
    planners_of,
    sharders_of,
    versus,
)
from benchmarks.shard_bench import (
    add_round_arguments,
    interleaved,
    open_bench,
    random_ids,
)
from dlrm_sharded.calibration.evaluate import TimePairs
from dlrm_sharded.calibration.rank_bench import RankBench
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, PlanCost, StageCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner
from studies.study import Case, Row

MEASURED_SHARDERS = (
    "neuroshard",
    "neuroshard_paper",
    "torchrec",
    "torchrec_calibrated",
    "size_lookup",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of tasks, ids and order [%(default)s]"
    )
    add_sharder_arguments(parser, MEASURED_SHARDERS)
    add_round_arguments(parser, rounds=3, item="rank")
    add_row_arguments(parser, row="plan")


def run(options: argparse.Namespace) -> None:
    compare(options, _cases(options), report)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each task, whose plans are measured in turns."""
    with open_bench(options.iterations, table_bytes=MEASURED_RANK_BYTES) as (bench, device):
        planners = planners_of(
            options.sharders, device=device.type, hardware=local_hardware(device)
        )
        for number, benchmark_task in enumerate(measured_tasks(options.seed, num=options.tasks)):
            task = on_device(benchmark_task.task, device.type)
            rng = np.random.default_rng([options.seed, number])
            measure = functools.partial(
                task_rows, number, task, planners, bench, rng, rounds=options.rounds
            )
            yield Case(f"task {number}", functools.partial(_shown, number, measure))


def _shown(number: int, measure: Callable[[], list[Row]]) -> list[Row]:
    rows = measure()
    print(_line(number, rows), flush=True)
    return rows


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A sharder's plan of a task and its predicted cost; both are None if it found no plan."""

    number: int
    sharder: str
    plan: ShardingPlan | None
    predicted: PlanCost | None


def _plan(number: int, sharder: str, planner: Planner, task: ShardingTask) -> PlannedTask:
    try:
        plan, report = planner.plan(task)
    except ShardingError:
        return PlannedTask(number, sharder, None, None)
    return PlannedTask(number, sharder, plan, report.cost)


def task_rows(
    number: int,
    task: ShardingTask,
    planners: Mapping[str, Planner],
    bench: RankBench,
    rng: np.random.Generator,
    *,
    rounds: int,
) -> list[Row]:
    """Return the rows of the sharders' plans of a task, all measured on the same ids."""
    planned = [_plan(number, name, planner, task) for name, planner in planners.items()]
    ids = random_ids(task, rng)
    ranks = range(task.topology.world_size)
    groups = {
        (i, rank): [shard for shard in entry.plan.shards if shard.rank == rank]
        for i, entry in enumerate(planned)
        if entry.plan is not None
        for rank in ranks
    }
    measured = interleaved(bench, groups, ids, rounds=rounds, rng=rng)
    return [
        _row(entry, [measured[i, rank] for rank in ranks] if entry.plan is not None else [])
        for i, entry in enumerate(planned)
    ]


def _row(planned: PlannedTask, rounds_by_rank: Sequence[Sequence[StageCost]]) -> Row:
    row: Row = {"number": planned.number, "sharder": planned.sharder}
    if planned.plan is None or planned.predicted is None:
        return row
    measured = PlanCost(
        tuple(
            predicted.with_stages(
                {
                    stage: statistics.median(cost.stage_ms(stage) for cost in rounds)
                    for stage in COMPUTE_STAGES
                }
            )
            for rounds, predicted in zip(rounds_by_rank, planned.predicted.per_rank, strict=True)
        )
    )
    return row | {
        "plan": planned.plan.to_json()["shards"],
        "predicted": planned.predicted.to_json(),
        "measured": measured.to_json(),
        "rounds_ms": [[cost.computation_ms for cost in rounds] for rounds in rounds_by_rank],
        "cost_ms": measured.cost_ms,
        "predicted_ms": planned.predicted.cost_ms,
        "compute_ms": max(cost.computation_ms for cost in measured.per_rank),
        "predicted_compute_ms": max(cost.computation_ms for cost in planned.predicted.per_rank),
    }


def _line(number: int, rows: Sequence[Row]) -> str:
    costs = (
        f"{row['sharder']} {row['cost_ms']:.2f} ({row['predicted_ms']:.2f})"
        if "cost_ms" in row
        else f"{row['sharder']} no plan"
        for row in rows
    )
    return f"task {number}: measured (predicted) ms: {', '.join(costs)}"


def report(rows: Sequence[Row], chosen_reference: str | None) -> None:
    """Print how much the sharders differ, measured and predicted, and the model's errors."""
    sharders, reference = sharders_of(rows, chosen_reference)
    figures = {
        key: costs_of(rows, key)
        for key in ("cost_ms", "predicted_ms", "compute_ms", "predicted_compute_ms")
    }
    lines = []
    for sharder in sharders:
        against = {key: versus(costs, sharder, reference) for key, costs in figures.items()}
        measured = against["cost_ms"]
        lines.append(
            [
                sharder,
                measured.num,
                *(against[key] for key in figures),
                measured.score,
            ]
        )
    header = ["sharder", "tasks", "cost measured", "predicted"]
    header += ["slowest rank's computation measured", "predicted", "wins/ties/losses measured"]
    print(f"\nover {reference}, mean [95 %], on the tasks that both solve:\n")
    print(markdown(header, lines))
    print(f"\nthe model's errors:\n\n{_errors(rows, sharders)}")
    print(
        "\nmean absolute deviation of one round from the median of its rank: "
        f"{_round_spread(rows):.1f} %"
    )


def _errors(rows: Sequence[Row], sharders: Sequence[str]) -> str:
    """Return a table of the model's errors on every rank's computation and on whole plans."""
    lines = []
    for sharder in sharders:
        ranks, plans = TimePairs(), TimePairs()
        for row in rows:
            if row["sharder"] != sharder or "cost_ms" not in row:
                continue
            plans.add(row["predicted_ms"], row["cost_ms"])
            costs = (PlanCost.from_json(row[key]).per_rank for key in ("predicted", "measured"))
            for predicted, measured in zip(*costs, strict=True):
                if measured.computation_ms > 0:
                    ranks.add(predicted.computation_ms, measured.computation_ms)
        cells: list[object] = [sharder]
        for pairs in (ranks, plans):
            errors = 100 * pairs.relative_errors
            cells += [interval_text(errors, "+.1f"), f"{np.abs(errors).mean():.1f}"]
            cells.append(f"{np.std(errors):.1f}")
        lines.append(cells)
    error_names = ("bias, % [95 %]", "MAPE, %", "spread, %")
    header = [
        f"{quantity}: {error}"
        for quantity in ("rank's computation", "cost")
        for error in error_names
    ]
    return markdown(["sharder", *header], lines)


def _round_spread(rows: Sequence[Row]) -> float:
    """Return the mean deviation of a rank's computation from its median over rounds, in percent."""
    errors = [
        abs(once / statistics.median(rounds) - 1)
        for row in rows
        for rounds in row.get("rounds_ms", [])
        for once in rounds
        if once > 0
    ]
    return 100 * statistics.fmean(errors)
