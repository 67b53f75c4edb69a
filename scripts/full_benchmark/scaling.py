"""Measures how the time to plan grows with the numbers of tables and of ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from benchmarks.compared import on_device, quiet
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import scaling_task
from full_benchmark.planned import SEED, outcome_in_time, planner_on
from full_benchmark.sizes import SCALING_SHARDERS, Sizes
from full_benchmark.study import Item, Row, Study

UNBOUNDED = ("neuroshard", "dim")
"""Sharders that plan tasks of any size in seconds."""

SECONDS_OF_LARGE = 8.0


def study(sizes: Sizes) -> Study:
    return Study("scaling", "measured", list(_items(sizes)))


def _items(sizes: Sizes) -> Iterator[Item]:
    base_tables, base_ranks = sizes.base
    curves = {
        "tables": [(num, min(base_ranks, num)) for num in sizes.tables],
        "ranks": [(base_tables, num) for num in sizes.ranks],
    }
    for axis, points in curves.items():
        for num_tables, num_ranks in points:
            for sharder in SCALING_SHARDERS:
                is_large = num_tables > sizes.slow_tables or num_ranks > sizes.slow_ranks
                if is_large and sharder not in UNBOUNDED:
                    continue
                yield Item(
                    f"{axis}/{num_tables}x{num_ranks}/{sharder}",
                    SECONDS_OF_LARGE if num_tables * num_ranks > 10_000 else 1.0,
                    functools.partial(_run, axis, num_tables, num_ranks, sharder),
                )


def _run(axis: str, num_tables: int, num_ranks: int, sharder: str) -> list[Row]:
    quiet()
    benchmark_task = _task(num_tables, num_ranks)
    found = outcome_in_time(0, benchmark_task, sharder, planner_on(sharder, None))
    return [{"axis": axis} | dataclasses.asdict(found)]


@functools.cache
def _task(num_tables: int, num_ranks: int) -> BenchmarkTask:
    task = scaling_task(num_tables, num_ranks, seed=SEED)
    return BenchmarkTask("scaling", on_device(task, "cpu"))
