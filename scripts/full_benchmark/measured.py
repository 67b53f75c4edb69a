"""Plans whose ranks are measured one after the other on one device; exchanges are predicted."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from benchmarks.compared import on_device, planners_of
from benchmarks.measured import task_rows
from benchmarks.shard_bench import open_bench
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.plan_cost import PlanCost
from full_benchmark.planned import SEED
from full_benchmark.sizes import FULL, MEASURED_SHARDERS, SMALL, Sizes
from studies.study import Case, Row, StudyRun

ITERATIONS = 6


def run(study: StudyRun) -> None:
    study.rows(_cases(SMALL if study.small else FULL), "measured")


def _cases(sizes: Sizes) -> Iterator[Case]:
    for world_size, num in sizes.measured.items():
        for number in range(num):
            run = functools.partial(_run, world_size, number, sizes.rounds)
            yield Case(f"{world_size} ranks/{number}", run)


def _run(world_size: int, number: int, rounds: int) -> list[Row]:
    tasks = measured_tasks(SEED + world_size, num=number + 1, world_size=world_size)
    with open_bench(ITERATIONS, table_bytes=MEASURED_RANK_BYTES) as (bench, device):
        task = on_device(tasks[number].task, device.type)
        planners = planners_of(
            MEASURED_SHARDERS, device=device.type, hardware=local_hardware(device)
        )
        rng = np.random.default_rng([SEED, world_size, number])
        rows = task_rows(number, task, planners, bench, rng, rounds=rounds)
    size = {"world_size": world_size, "num_tables": len(task.tables)}
    return [size | _summary(row) for row in rows]


def _summary(row: Row) -> Row:
    """Return the costs of a plan, with those of every round; a row without a plan stays so."""
    if "cost_ms" not in row:
        return row
    measured = PlanCost.from_json(row["measured"])
    comm_ms = [rank.exchange_ms for rank in measured.per_rank]
    rounds_ms = (np.array(row["rounds_ms"]) + np.array(comm_ms)[:, None]).max(axis=0)
    kept = ("number", "sharder", "cost_ms", "predicted_ms", "compute_ms", "predicted_compute_ms")
    return {key: row[key] for key in kept} | {
        "critical_path_ms": measured.critical_path_ms,
        "rounds_ms": rounds_ms.tolist(),
    }
