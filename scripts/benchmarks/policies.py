"""The papers' policies alone against the heuristics, on tables that they were not trained on.

Tasks are of the authors' kinds: tables of equal width, of two widths, and of all widths. The
search without splits and replicas shows how much any placement of whole tables could gain.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from benchmarks.figures import Task, costs_of, sharders_of
from benchmarks.measured import open_bench, task_rows
from benchmarks.planners import SHARDERS_TEXT, planners_of
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.tasks import TableSet, TaskPool, training_tasks
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
POLICIES, HEURISTICS = (
    ("dreamshard", "autoshard"),
    ("random", "dim", "size", "lookup", "size_lookup"),
)
SEARCH = "neuroshard,sharder.split=never,sharder.rows=never,sharder.replicate=never"
TYPICAL, DRAWN = "typical", "drawn"
FIGURES = {"cost_ms": "Embedding cost:", "compute_ms": "Computation of the slowest rank:"}
ITERATIONS = 6
"""Iterations of a rank in a round of measurements."""

OPTIONS = {
    "widths": option(("16", "16,32", "4,8,16,32,64,128"), "columns that the tables of a task have"),
    "sizes": option(("50x4",), "tables x ranks"),
    "accesses": option(
        (TYPICAL, DRAWN), "of Meta's skew, or patterns drawn for half of the tables"
    ),
    "batch_size": option(8192, "global batch size"),
    "tasks": option(20, "tasks of each kind"),
    "seed": option(2026, "seed of the tasks"),
    "sharders": option((*POLICIES, *HEURISTICS, SEARCH), SHARDERS_TEXT),
    "rounds": option(0, "times that the computation of each rank is measured; 0: predicted costs"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for accesses in options.accesses:
        for widths in options.widths:
            for size in options.sizes:
                of_kind = functools.partial(_rows, options, accesses, widths, size)
                yield Case(f"{widths} columns, {accesses} accesses, {size}", of_kind)


def _rows(options: argparse.Namespace, accesses: str, widths: str, size: str) -> list[Row]:
    quiet()
    torch.set_num_threads(1)
    pool = _pool(accesses, widths, size, options.batch_size)
    rng = np.random.default_rng([options.seed, pool.num_tables, pool.world_size])
    tasks = [pool.task(pool.draw(rng)) for _ in range(options.tasks)]
    rows = _measured(options, pool, tasks) if options.rounds else _planned(options, tasks)
    kind = {"set": f"{widths} columns, {accesses} accesses, {size}", "world_size": pool.world_size}
    return [kind | row for row in rows]


def _pool(accesses: str, widths: str, size: str, batch_size: int) -> TaskPool:
    """Return tasks of tables that no policy was trained on, which fill 30 to 70 % of the memory."""
    num_tables, world_size = map(int, size.split("x"))
    pool = training_tasks(
        tables=["papers"],
        part="unseen",
        num_tables=num_tables,
        world_size=world_size,
        batch_sizes=[batch_size],
        few_widths=0.0,
        varied_accesses=accesses == DRAWN,
    )
    [found] = pool.sets
    columns = {int(width) for width in widths.split(",")}
    tables = tuple(table for table in found.tables if table.embedding_dim in columns)
    return TaskPool(
        (TableSet(tables, batch_size, found.accesses),),
        num_tables,
        world_size,
        pool.memory_use,
        pool.max_table_share,
    )


def _planned(options: argparse.Namespace, tasks: Sequence[ShardingTask]) -> list[Row]:
    """Plan the tasks under the packaged prices, whatever the hardware."""
    planners = planners_of(options.sharders, device="cpu")
    rows: list[Row] = []
    for number, task in enumerate(tasks):
        for name, planner in planners.items():
            rows.append({"number": number, "sharder": name})
            try:
                _, report = planner.plan(task)
            except ShardingError:
                continue
            assert report.cost is not None, "planners of comparisons have a cost model"
            rows[-1] |= {"cost_ms": report.cost.cost_ms, "solve_s": report.solve_s}
    return rows


def _measured(
    options: argparse.Namespace, pool: TaskPool, tasks: Sequence[ShardingTask]
) -> list[Row]:
    """Measure the computation of the plans here; exchanges have the prices of this hardware."""
    rng, rows = np.random.default_rng(options.seed), []
    with open_bench(ITERATIONS, table_bytes=pool.rank_bytes) as (bench, device):
        planners = planners_of(
            options.sharders, device=device.type, hardware=local_hardware(device)
        )
        for number, task in enumerate(tasks):
            rows += task_rows(
                *(number, task, planners, bench, rng),
                rounds=options.rounds,
                accesses=pool.accesses(task),
            )
    return rows


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the cost of every other sharder over each policy's, and the policy's share of the gain.

    The gain is what the reference's plans cost less than those of the best heuristic.
    """
    texts = ["Cost of others' plans over the policy's, mean over the tasks that both solve."]
    for key, title in FIGURES.items():
        if any(key in row for row in rows):
            texts += [title, _table(rows, key, reference or SEARCH)]
    return "\n\n".join(texts)


def _table(rows: Sequence[Row], key: str, reference: str) -> str:
    policies = [name for name in sharders_of(rows) if name.split(",")[0] in POLICIES]
    others = [name for name in sharders_of(rows) if name not in policies]
    titles = ["the search" if name == SEARCH else name for name in others]
    lines = []
    for kind in dict.fromkeys(row["set"] for row in rows):
        found = [row for row in rows if row["set"] == kind]
        costs = costs_of(found, key)
        for policy in policies:
            ratios = [_mean_ratio(costs[name], costs[policy]) for name in others]
            seconds = [
                row["solve_s"] for row in found if row["sharder"] == policy and "solve_s" in row
            ]
            share = _share(costs, policy, reference)
            lines.append((kind, policy, *ratios, share, max(seconds) if seconds else None))
    columns: list[Column | str] = [
        *("tasks", "policy"),
        *(Column(title, ".3f") for title in titles),
        *(Column("share of the gain", ".0%"), Column("s to plan, worst", ".3f")),
    ]
    return TextTable(columns, lines).markdown()


def _mean_ratio(costs: Mapping[Task, float], policy: Mapping[Task, float]) -> float | None:
    """Return the mean of a sharder's costs over the policy's, of the tasks that both solve."""
    ratios = [costs[task] / policy[task] for task in costs if task in policy]
    return float(np.mean(ratios)) if ratios else None


def _share(costs: Mapping[str, Mapping[Task, float]], policy: str, search: str) -> float | None:
    """Return the share of the gain over the best heuristic of all tasks that the policy has."""
    found = {name: costs[name] for name in (policy, search, *HEURISTICS) if costs.get(name)}
    if policy not in found or search not in found or len(found) < 3:
        return None
    tasks = set.intersection(*(set(by_task) for by_task in found.values()))
    sums = {name: sum(by_task[task] for task in tasks) for name, by_task in found.items()}
    best = min(sums[name] for name in HEURISTICS if name in sums)
    return (best - sums[policy]) / (best - sums[search])
