"""Plans, costs and times of several sharders on sets of tasks, under the learned cost model.

Every plan is made in a process of its own, within a time and with a peak of memory of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.figures import choose_reference, exponent, sharders_of, task_of
from benchmarks.mlperf_steps import MLPERF_BATCH_SIZES, mlperf_task
from benchmarks.planners import SHARDERS_TEXT, on_device, planner_of
from dlrm_sharded.contest.cases import solve_in_time
from dlrm_sharded.contest.entry import Case, Entry
from dlrm_sharded.contest.score import TIE, predicted_costs, scores
from dlrm_sharded.contest.score_text import failures, notes, score_table
from dlrm_sharded.contest.tables import by_plan
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import TASK_SETS, scaling_task
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from studies.parts import option
from studies.processes import quiet
from studies.study import Case as StudyCase
from studies.study import Row

BASIS = "predicted"
SHARDERS = (
    *("neuroshard", "neuroshard_paper", "torchrec", "torchrec_calibrated"),
    *("size_lookup", "lookup", "dim", "size"),
)
MLPERF, SIZED, PRODUCTION = "mlperf", "sized", "production"
SETS = (*TASK_SETS, MLPERF, SIZED, PRODUCTION)
INFEASIBLE = "infeasible"
GPUS_OF_HOST = 8

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


def cases(options: argparse.Namespace) -> Iterator[StudyCase]:
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
            yield StudyCase(f"{name}/{number}, {size}/{sharder}", run)


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
    # MLPerf's tasks have the same tables
    number = world_size if task_set == MLPERF else len(task.tables)
    return number, _on(BenchmarkTask(task_set, task), device)


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
    case = Case(f"{name} {number}", sharder, found.task, planner, found.kind)
    entry = solve_in_time(case, limit_s=options.limit_s)
    row: Row = {"set": name, "gpu": options.gpu, "number": number}
    row |= {"num_tables": entry.num_tables, "world_size": entry.world_size, "kind": entry.kind}
    return [row | by_plan([entry], {}, sharder)[0] | {"entry": entry.to_json()}]


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how many plans each sharder finds in each set, in what time and at what cost."""
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
            texts += _table(feasible, reference)
        if name.startswith(PRODUCTION):
            papers = (f"{sharder} {ms}" for sharder, ms in PAPER_COST_MS.items())
            texts.append(f"The paper's costs in ms: {', '.join(papers)}.")
        if len({row["kind"] for row in of_set}) > 1:
            texts.append(_by_kind(of_set))
        if name.startswith(SIZED):
            texts.append(_growth(of_set))
    return "\n\n".join(texts)


def _table(rows: Sequence[Row], reference: str | None) -> list[str]:
    reference = choose_reference(reference, sharders_of(rows))
    entries = [Entry.from_json(row["entry"]) for row in rows]
    found = scores(entries, reference)
    texts = notes(found, reference, predicted_costs(entries), margin=TIE) + failures(entries)
    return [score_table(found, reference).markdown(), "\n".join(f"- {line}" for line in texts)]


def _by_kind(rows: Sequence[Row]) -> str:
    """Write the plans found of each kind of task; of infeasible tasks, the refusals."""
    kinds, lines = list(dict.fromkeys(row["kind"] for row in rows)), []
    for sharder in sharders_of(rows):
        cells = [sharder]
        for kind in kinds:
            found = [row for row in rows if row["sharder"] == sharder and row["kind"] == kind]
            key = "is_infeasible" if kind == INFEASIBLE else "cost_ms"
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
