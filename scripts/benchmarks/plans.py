"""Plans, costs and times of several sharders on one set of tasks, under the learned cost model."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.compared import (
    add_row_arguments,
    add_sharder_arguments,
    compare,
    costs_of,
    markdown,
    on_device,
    over_best,
    planner_of,
    planners_of,
    quiet,
    sharders_of,
    versus,
)
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import InfeasibleTaskError, ShardingError
from dlrm_sharded.sharders.planning import Planner
from studies.study import Case, Row

PLANNED_SHARDERS = (
    "neuroshard",
    "neuroshard_paper",
    "torchrec",
    "torchrec_calibrated",
    "size_lookup",
    "lookup",
    "dim",
    "size",
)
INFEASIBLE = "infeasible"
MIB_OF_MAXRSS = 1 / 1024
"""Factor from `ru_maxrss`, which Linux gives in KiB, to MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", choices=TASK_SETS, default="paper", dest="task_set")
    parser.add_argument("--num", type=int, help="number of tasks; by default, all of the set")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks [%(default)s]")
    add_sharder_arguments(parser, PLANNED_SHARDERS)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the ranks [%(default)s]"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=600,
        help="time limit for a plan of a scale set [%(default)s]",
    )
    add_row_arguments(parser, row="plan")


def run(options: argparse.Namespace) -> None:
    compare(options, _cases(options), report)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A set of tasks, for ranks on one kind of device."""

    task_set: str
    seed: int
    num: int | None
    device: str

    def tasks(self) -> list[BenchmarkTask]:
        arguments = {} if self.num is None else {"num": self.num}
        return [
            dataclasses.replace(benchmark_task, task=on_device(benchmark_task.task, self.device))
            for benchmark_task in TASK_SETS[self.task_set](self.seed, **arguments)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plan of a sharder for a task in figures, or the error that it raised.

    Args:
        solve_s: time that the sharder took until it returned a plan or raised an error.
        refused: the sharder raised InfeasibleTaskError, and did not fail in another way.
        before_mib, peak_mib: peak resident memory of the process before and after planning, if
            it planned nothing else.
    """

    number: int
    kind: str
    num_tables: int
    world_size: int
    sharder: str
    solve_s: float
    num_shards: int | None = None
    cost_ms: float | None = None
    critical_path_ms: float | None = None
    lower_bound_ms: float | None = None
    gap: float | None = None
    error: str | None = None
    refused: bool = False
    before_mib: float | None = None
    peak_mib: float | None = None

    @classmethod
    def for_task(
        cls, number: int, benchmark_task: BenchmarkTask, sharder: str, **figures: Any
    ) -> Outcome:
        """Return the outcome for a task; `figures` are the fields that depend on the plan."""
        task = benchmark_task.task
        num_tables, world_size = len(task.tables), task.topology.world_size
        return cls(number, benchmark_task.kind, num_tables, world_size, sharder, **figures)


def outcome(number: int, benchmark_task: BenchmarkTask, sharder: str, planner: Planner) -> Outcome:
    """Plan a task; the cost is that of the planner's cost model, not the sharder's own."""
    started = time.perf_counter()
    try:
        plan, report = planner.plan(benchmark_task.task)
    except ShardingError as error:
        return Outcome.for_task(
            number,
            benchmark_task,
            sharder,
            solve_s=time.perf_counter() - started,
            error=f"{type(error).__name__}: {error}",
            refused=isinstance(error, InfeasibleTaskError),
        )
    cost = report.cost
    assert cost is not None, "planners of comparisons have a cost model"
    return Outcome.for_task(
        number,
        benchmark_task,
        sharder,
        solve_s=report.solve_s,
        num_shards=len(plan.shards),
        cost_ms=cost.cost_ms,
        critical_path_ms=cost.critical_path_ms,
        lower_bound_ms=report.lower_bound_ms,
        gap=report.gap,
    )


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    tasks_of = TaskSet(options.task_set, options.seed, options.num, options.device)
    if options.task_set.startswith("scale"):
        return _cases_apart(tasks_of, options.sharders, options.limit_s)
    return _cases_here(tasks_of, options.sharders)


def _cases_here(tasks_of: TaskSet, sharders: Sequence[str]) -> Iterator[Case]:
    quiet()
    planners = planners_of(sharders, device=tasks_of.device)
    for number, benchmark_task in enumerate(tqdm(tasks_of.tasks(), unit="task")):
        for sharder, planner in planners.items():
            run = functools.partial(_row_here, number, benchmark_task, sharder, planner)
            yield Case(f"{number}/{sharder}", run)


def _row_here(
    number: int, benchmark_task: BenchmarkTask, sharder: str, planner: Planner
) -> list[Row]:
    return [dataclasses.asdict(outcome(number, benchmark_task, sharder, planner))]


def _cases_apart(tasks_of: TaskSet, sharders: Sequence[str], limit_s: float) -> Iterator[Case]:
    """Make every plan in a new process, so that each has its own peak of memory."""
    for number, benchmark_task in enumerate(tasks_of.tasks()):
        for sharder in sharders:
            late = Outcome.for_task(
                number,
                benchmark_task,
                sharder,
                solve_s=limit_s,
                error=f"no plan within {limit_s:g} s",
            )
            run = functools.partial(_row_apart, tasks_of, late, limit_s)
            yield Case(f"{number}/{sharder}", run)


def _row_apart(tasks_of: TaskSet, late: Outcome, limit_s: float) -> list[Row]:
    """Return the row of a plan, and print it; `late` is the outcome if there is none in time."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_send_outcome, args=(sender, tasks_of, late.number, late.sharder)
    )
    process.start()
    sender.close()
    result = late
    try:
        receiver.recv()  # it is ready to plan
        if receiver.poll(limit_s):
            result = receiver.recv()
    except EOFError:
        process.join()
        ended = f"its process ended with exit code {process.exitcode}"
        result = dataclasses.replace(result, error=ended)
    process.kill()
    process.join()
    row = dataclasses.asdict(result)
    print(_scale_line(row), flush=True)
    return [row]


def _send_outcome(sender: Connection, tasks_of: TaskSet, number: int, sharder: str) -> None:
    quiet()
    benchmark_task, planner = tasks_of.tasks()[number], planner_of(sharder, device=tasks_of.device)
    before_mib = _peak_mib()
    sender.send("ready")
    result = outcome(number, benchmark_task, sharder, planner)
    sender.send(dataclasses.replace(result, before_mib=before_mib, peak_mib=_peak_mib()))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MIB_OF_MAXRSS


def report(rows: Sequence[Row], chosen_reference: str | None) -> None:
    """Print how many plans each sharder finds, in what time and at what cost."""
    feasible = [row for row in rows if row["kind"] != INFEASIBLE]
    sharders, reference = sharders_of(feasible, chosen_reference)
    costs = costs_of(feasible)
    num_common, mean_over_best = over_best(costs)
    bounds = _bounds(feasible)
    lines = []
    for sharder in sharders:
        sharder_rows = [row for row in feasible if row["sharder"] == sharder]
        solve_s = [row["solve_s"] for row in sharder_rows]
        against = versus(costs, sharder, reference)
        gaps = [
            cost / bounds[number] - 1 for number, cost in costs[sharder].items() if number in bounds
        ]
        lines.append(
            [
                sharder,
                f"{len(costs[sharder])}/{len(sharder_rows)}",
                f"{np.mean(solve_s):.3f}",
                f"{max(solve_s):.3f}",
                f"{mean_over_best[sharder]:.4f}",
                against.num,
                against,
                against.score,
                f"{100 * np.mean(gaps):.1f}, {100 * max(gaps):.1f} ({len(gaps)})" if gaps else "-",
            ]
        )
    header = [
        "sharder",
        "plans",
        "s, mean (with or without a plan)",
        "s, worst",
        f"cost / best ({num_common} tasks that all solve)",
        "both solve",
        f"cost / {reference} [95 %]",
        "wins/ties/losses",
        "gap to bound, %: mean, worst (tasks)",
    ]
    print(f"\n{markdown(header, lines)}")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    if any(row["peak_mib"] for row in rows):
        print("\n" + "\n".join(_scale_line(row) for row in rows))
    elif len(kinds) > 1:
        print(f"\n{markdown(['sharder', *kinds], [_by_kind(rows, s, kinds) for s in sharders])}")


def _bounds(rows: Sequence[Row]) -> dict[int, float]:
    """Return the highest lower bound that any sharder proved, by task."""
    bounds: dict[int, float] = {}
    for row in rows:
        if row["lower_bound_ms"] is not None:
            bounds[row["number"]] = max(bounds.get(row["number"], 0.0), row["lower_bound_ms"])
    return bounds


def _by_kind(rows: Sequence[Row], sharder: str, kinds: Sequence[str]) -> list[str]:
    """Return the table cells of a sharder: for each kind, the plans found out of all tasks.

    For infeasible tasks, the tasks that it refused are counted instead.
    """
    cells = [sharder]
    for kind in kinds:
        sharder_rows = [row for row in rows if row["sharder"] == sharder and row["kind"] == kind]
        key = "refused" if kind == INFEASIBLE else "cost_ms"
        cells.append(f"{sum(bool(row[key]) for row in sharder_rows)}/{len(sharder_rows)}")
    return cells


def _scale_line(row: Row) -> str:
    """Write one line about a plan that was made in a process of its own."""
    line = (
        f"{row['num_tables']:6,} tables {row['world_size']:5,} ranks  {row['sharder']:20} "
        f"{row['solve_s']:8.2f} s"
    )
    if row["peak_mib"] is not None:
        line += f"  {row['peak_mib'] - row['before_mib']:8,.0f} MiB over {row['before_mib']:,.0f}"
    if row["cost_ms"] is None:
        return f"{line}  {row['error'][:100]}"
    return f"{line}  cost {row['cost_ms']:9.2f} ms, {row['num_shards']:,} shards"
