"""Plans, costs and times of several sharders on sets of tasks, under the learned cost model.

Every plan is made in a process of its own, within a time and with a peak of memory of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.figures import (
    Costs,
    costs_of,
    exponent,
    sharder_table,
    sharders_of,
    task_of,
)
from benchmarks.planners import SHARDERS_TEXT, on_device, planner_of
from benchmarks.priors import MLPERF_BATCH_SIZES, mlperf_task
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import TASK_SETS, scaling_task
from dlrm_sharded.files.errors import InfeasibleTaskError, ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.ranks.workers import Refusal, in_processes
from dlrm_sharded.sharders.planning import Planner
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
SHARDERS = (
    *("neuroshard", "neuroshard_paper", "torchrec", "torchrec_calibrated"),
    *("size_lookup", "lookup", "dim", "size"),
)
MLPERF, SIZED, PRODUCTION = "mlperf", "sized", "production"
SETS = (*TASK_SETS, MLPERF, SIZED, PRODUCTION)
INFEASIBLE = "infeasible"
GPUS_OF_HOST = 8
MIB_OF_MAXRSS = 1 / 1024
"""Factor from `ru_maxrss`, which Linux gives in KiB, to MiB."""

PAPER_COST_MS = {
    **{"random": 118.3, "size": 107.6, "dim": 90.8, "lookup": 102.4, "size_lookup": 109.2},
    **{"autoshard": 86.6, "dreamshard": 61.6, "torchrec": 86.4, "neuroshard": 55.2},
}
"""Embedding costs in NeuroShard (arXiv:2305.01868), sec. 4.5: the production model, 128 GPUs. Its
tables are not public, so only ratios can be compared."""


OPTIONS = {
    "set": option("paper", "set of tasks", choices=SETS),
    "num": option(int, "number of tasks; by default, all of the set"),
    "numbers": option(int, "some of the tasks", nargs="+"),
    "sizes": option(
        ("1000x32",), f"tables x ranks of {SIZED!r} and {PRODUCTION!r}; ranks of {MLPERF!r}"
    ),
    "seed": option(0, "seed of the tasks"),
    "sharders": option(SHARDERS, SHARDERS_TEXT),
    "device": option("cpu", "device of the ranks", choices=["cpu", "cuda"]),
    "gpu": option(str, "GPU whose prior has the prices", choices=list(gpu_specs())),
    "limit_s": option(600.0, "time limit for a plan"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    device = "cuda" if options.gpu else options.device
    name = f"{options.set} on {options.gpu}" if options.gpu else options.set
    if options.set in (MLPERF, SIZED, PRODUCTION):
        tasks = [_sized(options.set, size, options.seed, device) for size in options.sizes]
    else:
        tasks = _tasks(options.set, options.seed, options.num, options.numbers, device)
    for number, task in tasks:
        for sharder in options.sharders:
            size = f"{len(task.task.tables)}x{task.task.topology.world_size}"
            run = functools.partial(_rows, name, number, task, sharder, device, options)
            yield Case(f"{name}/{number}, {size}/{sharder}", run)


def _tasks(
    task_set: str, seed: int, num: int | None, numbers: Sequence[int] | None, device: str
) -> list[tuple[int, BenchmarkTask]]:
    num = 1 + max(numbers) if numbers else num
    tasks = TASK_SETS[task_set](seed, **({} if num is None else {"num": num}))
    return [(i, _on(tasks[i], device)) for i in numbers or range(len(tasks))]


def _sized(task_set: str, size: str, seed: int, device: str) -> tuple[int, BenchmarkTask]:
    """Return a task of a size; tables of the production model lie on hosts of 8 GPUs."""
    num_tables, _, num_ranks = size.rpartition("x")
    world_size = int(num_ranks)
    if task_set == MLPERF:
        batch_size = MLPERF_BATCH_SIZES.get(world_size, max(MLPERF_BATCH_SIZES.values()))
        task = mlperf_task(world_size, batch_size, gpu_specs()["h100_sxm"])
    else:
        task = scaling_task(int(num_tables), world_size, seed=seed)
    if task_set == PRODUCTION:
        topology = dataclasses.replace(
            task.topology,
            local_world_size=min(world_size, GPUS_OF_HOST),
            inter_host_bytes_per_s=None,
        )
        task = dataclasses.replace(task, topology=topology)
    return len(task.tables), _on(BenchmarkTask(task_set, task), device)


def _on(found: BenchmarkTask, device: str) -> BenchmarkTask:
    return dataclasses.replace(found, task=on_device(found.task, device))


def _rows(
    name: str,
    number: int,
    found: BenchmarkTask,
    sharder: str,
    device: str,
    options: argparse.Namespace,
) -> list[Row]:
    quiet()
    hardware = Hardware(gpu_specs()[options.gpu].device_name) if options.gpu else None
    planner = planner_of(sharder, device=device, hardware=hardware)
    row: Row = {"set": name, "gpu": options.gpu, "number": number, "sharder": sharder}
    return [row | outcome_in_time(found, planner, limit_s=options.limit_s)]


def outcome_in_time(found: BenchmarkTask, planner: Planner, *, limit_s: float) -> Row:
    """Plan a task in a limited time; a sharder that takes longer or fails has found no plan."""
    started = time.perf_counter()
    [row] = in_processes([lambda: outcome(found, planner)], limit_s=limit_s, num_workers=1)
    topology = found.task.topology
    size: Row = {"num_tables": len(found.task.tables), "world_size": topology.world_size}
    size |= {"kind": found.kind, "memory_bytes": topology.memory_bytes}
    if isinstance(row, Refusal):
        row = NO_PLAN | {"solve_s": time.perf_counter() - started, "error": row.message}
    return size | row


FIGURES = ("num_shards", "cost_ms", "critical_path_ms", "lower_bound_ms", "gap", "error")
NO_PLAN: Row = dict.fromkeys(FIGURES) | {"refused": False, "before_mib": None, "peak_mib": None}


def outcome(found: BenchmarkTask, planner: Planner) -> Row:
    """Plan a task; the cost is that of the planner's cost model, whatever the sharder predicts."""
    before_mib, started = _peak_mib(), time.perf_counter()
    try:
        plan, report = planner.plan(found.task)
    except ShardingError as error:
        return NO_PLAN | {
            "solve_s": time.perf_counter() - started,
            "error": f"{type(error).__name__}: {error}",
            "refused": isinstance(error, InfeasibleTaskError),
        }
    cost = report.cost
    assert cost is not None, "planners of comparisons have a cost model"
    return NO_PLAN | {
        "solve_s": report.solve_s,
        "num_shards": len(plan.shards),
        "cost_ms": cost.cost_ms,
        "critical_path_ms": cost.critical_path_ms,
        "lower_bound_ms": report.lower_bound_ms,
        "gap": report.gap,
        "before_mib": before_mib,
        "peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MIB_OF_MAXRSS


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how many plans each sharder finds in each set, in what time and at what cost."""
    rows = [{"set": "tasks", "gpu": None} | row for row in rows]  # older rows name no set
    texts = []
    for name in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == name]
        gpu, sizes = of_set[0]["gpu"], sorted({row["world_size"] for row in of_set})
        prices = f"the prior of {gpu}" if gpu else "the packaged prices of a CPU"
        ranks = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else f"{sizes[0]}"
        num_tasks = len({task_of(row) for row in of_set})
        texts.append(f"The set `{name}`: {num_tasks} tasks on {ranks} ranks, under {prices}.")
        feasible = [row for row in of_set if row["kind"] != INFEASIBLE]
        if len(set(Counter(row["sharder"] for row in feasible).values())) == 1:  # on equal tasks
            texts.append(_table(feasible, reference, is_production=name.startswith(PRODUCTION)))
        if len({row["kind"] for row in of_set}) > 1:
            texts.append(_by_kind(of_set))
        if name.startswith(SIZED):
            texts.append(_growth(of_set))
    return "\n\n".join(texts)


def _table(rows: Sequence[Row], reference: str | None, *, is_production: bool) -> str:
    costs, bounds = costs_of(rows), _bounds(rows)
    num_common, means = over_best(costs)

    def gaps(found: Sequence[Row]) -> str:
        gaps = [
            100 * (row["cost_ms"] / bounds[task_of(row)] - 1)
            for row in found
            if row["cost_ms"] is not None and task_of(row) in bounds
        ]
        return f"{np.mean(gaps):.1f}, {max(gaps):.1f} ({len(gaps)})" if gaps else "-"

    def solve_s(found: Sequence[Row]) -> str:
        seconds = [row["solve_s"] for row in found]
        return f"{np.mean(seconds):.3f}, {max(seconds):.3f}"

    def cost_ms(found: Sequence[Row]) -> str:
        costs_ms = [row["cost_ms"] for row in found if row["cost_ms"] is not None]
        return f"{np.mean(costs_ms):.2f}" if costs_ms else f"{found[0]['error']}"[:60]

    def memory(found: Sequence[Row]) -> str:
        used = [row["peak_mib"] - row["before_mib"] for row in found if row["peak_mib"]]
        return f"{max(used):,.0f}" if used else "-"

    others = {
        "ms, mean": cost_ms,
        f"cost / best ({num_common} tasks that all solve)": lambda found: (
            f"{means[found[0]['sharder']]:.4f}" if num_common else "-"
        ),
        "gap to bound, %: mean, worst (tasks)": gaps,
        "s, with or without a plan: mean, worst": solve_s,
        "MiB, worst": memory,
    }
    if is_production:
        others["the paper's, ms"] = lambda found: str(PAPER_COST_MS.get(found[0]["sharder"], "-"))
    return sharder_table(rows, reference, {"cost": "cost_ms"}, others)


def over_best(costs: Costs) -> tuple[int, dict[str, float]]:
    """Return the number of tasks that all sharders solve, and there each mean ratio to the best."""
    common = set.intersection(*(set(by_task) for by_task in costs.values()))
    best = {task: min(by_task[task] for by_task in costs.values()) for task in common}
    return len(common), {
        sharder: float(np.mean([by_task[task] / best[task] for task in common]))
        if common
        else math.nan
        for sharder, by_task in costs.items()
    }


def _bounds(rows: Sequence[Row]) -> dict[tuple[object, ...], float]:
    """Return the highest lower bound that any sharder proved, by task."""
    bounds: dict[tuple[object, ...], float] = {}
    for row in rows:
        if row["lower_bound_ms"] is not None:
            bounds[task_of(row)] = max(bounds.get(task_of(row), 0.0), row["lower_bound_ms"])
    return bounds


def _by_kind(rows: Sequence[Row]) -> str:
    """Write the plans found of each kind of task; of infeasible tasks, the refusals."""
    kinds, lines = list(dict.fromkeys(row["kind"] for row in rows)), []
    for sharder in sharders_of(rows):
        cells = [sharder]
        for kind in kinds:
            found = [row for row in rows if row["sharder"] == sharder and row["kind"] == kind]
            key = "refused" if kind == INFEASIBLE else "cost_ms"
            cells.append(f"{sum(bool(row[key]) for row in found)}/{len(found)}")
        lines.append(cells)
    return TextTable(["sharder", *kinds], lines).markdown()


def _growth(rows: Sequence[Row]) -> str:
    """Write how the time to plan grows with the tables and the ranks, if the other one is fixed."""
    lines = []
    for axis, fixed in (("num_tables", "world_size"), ("world_size", "num_tables")):
        for sharder in sharders_of(rows):
            found = [row for row in rows if row["sharder"] == sharder]
            for other in sorted({row[fixed] for row in found}):
                curve = [(row[axis], row) for row in found if row[fixed] == other]
                points = [(size, row["solve_s"]) for size, row in curve if row["cost_ms"]]
                if len(curve) < 2:
                    continue
                times = ", ".join(f"{size:,}: {seconds:.2f}" for size, seconds in points)
                failed = ", ".join(f"{size:,}" for size, row in curve if not row["cost_ms"])
                name = f"{axis}, {fixed} {other:,}"
                lines.append((name, sharder, times or None, exponent(points), failed or None))
    columns = ("axis", "sharder", "s to plan, by size", Column("exponent", ".2f"), "no plan for")
    return TextTable(columns, lines).markdown()
