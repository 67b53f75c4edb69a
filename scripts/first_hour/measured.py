"""Measured costs of sharders' plans under the model that `fit` made of this device.

It is the benchmark `measured`, with fewer tasks and with the links between GPUs stated.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import measured
from benchmarks.compared import costs_of, on_device, planners_of, versus
from benchmarks.shard_bench import open_bench
from dlrm_sharded.calibration.evaluate import TimePairs
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.task import ShardingTask
from first_hour.ranks import NVLINK_BYTES_PER_S, cost_model_file
from studies.study import Row, StudyRun

SHARDERS = ("neuroshard", "torchrec", "size_lookup")
REFERENCE = "torchrec"
NUM_TASKS, SMALL_NUM_TASKS = 6, 2
ROUNDS, ITERATIONS = 2, 8
TASK_S = 25
"""Time of a task on a GPU."""

SMALL_SHARE = 64
"""Divisor of batch sizes, tables and memory in a rehearsal."""

ROWS = Path("measured.jsonl")


def run(study: StudyRun) -> None:
    measure(
        study, study.device(), SHARDERS, num_tasks=SMALL_NUM_TASKS if study.small else NUM_TASKS
    )


def measure(
    study: StudyRun, device: torch.device, sharders: Sequence[str], *, num_tasks: int
) -> None:
    """Measure the plans of sharders for the first tasks of the benchmark, as far as time allows."""
    tasks = [_task(entry.task, study.small) for entry in measured_tasks(seed=0, num=num_tasks)]
    arena_bytes = MEASURED_RANK_BYTES // (SMALL_SHARE if study.small else 1)
    study.record("cost_model", cost_model_file(device))
    rows: list[Row] = []
    study.cases.plan(f"task {number}" for number in range(len(tasks)))
    with open_bench(3 if study.small else ITERATIONS, table_bytes=arena_bytes) as (bench, _):
        planners = planners_of(sharders, device=device.type, hardware=local_hardware(device))
        for number, task in enumerate(tasks):
            measure_task = functools.partial(
                measured.task_rows,
                number,
                on_device(task, device.type),
                planners,
                bench,
                np.random.default_rng([0, number]),
                rounds=1 if study.small else ROUNDS,
            )
            new = study.case(f"task {number}", measure_task, seconds=3 if study.small else TASK_S)
            if new is None:
                break
            rows += new
            replace_file(ROWS, "".join(json.dumps(row) + "\n" for row in rows).encode())
            _record(study, rows)
    if rows:
        measured.report(rows, REFERENCE)


def _task(task: ShardingTask, small: bool) -> ShardingTask:
    """Return the task with stated links, and smaller for a rehearsal."""
    topology = dataclasses.replace(task.topology, intra_host_bytes_per_s=NVLINK_BYTES_PER_S)
    task = dataclasses.replace(task, topology=topology)
    if not small:
        return task
    return dataclasses.replace(
        task,
        batch_size=task.batch_size // SMALL_SHARE,
        topology=dataclasses.replace(topology, memory_bytes=topology.memory_bytes // SMALL_SHARE),
        tables=tuple(
            dataclasses.replace(table, num_embeddings=max(1, table.num_embeddings // SMALL_SHARE))
            for table in task.tables
        ),
    )


def _record(study: StudyRun, rows: Sequence[Row]) -> None:
    """Keep the sharders' costs, their ratios and the errors of the model, over all tasks so far."""
    study.record("tasks", 1 + max(row["number"] for row in rows))
    for key in ("cost_ms", "predicted_ms", "compute_ms", "predicted_compute_ms"):
        costs = costs_of(rows, key)
        study.record(key, costs)
        ratios = {name: versus(costs, name, REFERENCE) for name in costs}
        study.record(f"{key} over {REFERENCE}", {name: r.mean for name, r in ratios.items()})
        intervals = {name: [r.low, r.high] for name, r in ratios.items() if r.num > 1}
        study.record(f"{key} over {REFERENCE}, 95 %", intervals)
        if key in ("compute_ms", "cost_ms"):
            study.show(**{f"neuroshard, {key} over {REFERENCE}": str(ratios["neuroshard"])})
    pairs = TimePairs()
    for row in rows:
        if "compute_ms" in row:
            pairs.add(row["predicted_compute_ms"], row["compute_ms"])
    if pairs.measured:
        study.record("errors of the slowest rank's computation", pairs.summary())
