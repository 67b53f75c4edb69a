"""Measures how the time to plan grows with the numbers of tables and of ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from benchmarks.compared import on_device, quiet
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import scaling_task
from full_benchmark.planned import SEED, outcome_in_time, planner_on
from full_benchmark.sizes import FULL, SCALING_SHARDERS, SMALL, Sizes
from studies.study import Case, Row, StudyRun

LARGEST = {"torchrec": (1000, 2), "autoshard": (1000, 128), "dreamshard": (1000, 128)}
"""Largest numbers of tables and ranks for sharders that take long; larger tasks take longer yet."""


def run(study: StudyRun) -> None:
    study.rows(_cases(SMALL if study.small else FULL), "measured")


def _cases(sizes: Sizes) -> Iterator[Case]:
    base_tables, base_ranks = sizes.base
    curves = {
        "tables": [(num, min(base_ranks, num)) for num in sizes.tables],
        "ranks": [(base_tables, num) for num in sizes.ranks],
    }
    for axis, points in curves.items():
        for num_tables, num_ranks in points:
            for sharder in SCALING_SHARDERS:
                most_tables, most_ranks = LARGEST.get(sharder, (num_tables, num_ranks))
                if axis == "tables" and num_tables > most_tables:
                    continue
                if axis == "ranks" and num_ranks > most_ranks:
                    continue
                yield Case(
                    f"{axis}/{num_tables}x{num_ranks}/{sharder}",
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
