"""The table of NeuroShard's production model, for a like model on simulated GPUs, by their prior.

Its tables are not public: the model here has tables with the statistics of Meta's dlrm_datasets.
The paper's model, neither: the rest of the step is what its own figures imply, see `REST`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from benchmarks.compared import on_device, quiet
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import scaling_task
from full_benchmark.planned import SEED, outcome_in_time, planner_on
from full_benchmark.sizes import FULL, SMALL, Sizes
from studies.study import Case, Row, StudyRun

GPU = "a100_sxm_80gb"
GPUS_OF_HOST = 8

PAPER_COST_MS = {
    "random": 118.3,
    "size": 107.6,
    "dim": 90.8,
    "lookup": 102.4,
    "size_lookup": 109.2,
    "autoshard": 86.6,
    "dreamshard": 61.6,
    "torchrec": 86.4,
    "neuroshard": 55.2,
}
"""Embedding costs in NeuroShard (arXiv:2305.01868), sec. 4.5: the production model, 128 GPUs."""

PAPER_GAIN = {
    "random": 0.0,
    "size": 0.040,
    "dim": 0.139,
    "lookup": 0.119,
    "size_lookup": 0.128,
    "autoshard": 0.324,
    "dreamshard": 0.453,
    "torchrec": 0.346,
    "neuroshard": 0.549,
}
"""Gain of training throughput over random, in the same table."""

REST = 0.505
"""Rest of the step relative to random's embedding cost, from 118.3 and 55.2 ms and + 54.9 %."""


LIMIT_S = 150.0
"""Time of a plan; whoever trains such a model can wait for it."""


def run(study: StudyRun) -> None:
    study.rows(_cases(SMALL if study.small else FULL), "predicted")


def _cases(sizes: Sizes) -> Iterator[Case]:
    num_tables, num_gpus = sizes.production
    for sharder in (*PAPER_COST_MS, "neuroshard_paper", "hugectr", "embark"):
        run = functools.partial(_run, num_tables, num_gpus, sharder)
        yield Case(f"{num_tables}x{num_gpus}/{sharder}", run)


def _run(num_tables: int, num_gpus: int, sharder: str) -> list[Row]:
    quiet()
    task = production_task(num_tables, num_gpus)
    found = outcome_in_time(0, task, sharder, planner_on(sharder, GPU), limit_s=LIMIT_S)
    return [{"gpu": GPU} | dataclasses.asdict(found)]


@functools.cache
def production_task(num_tables: int, num_gpus: int) -> BenchmarkTask:
    """Return tables that take 70 % of the GPUs' memory, on hosts of 8 GPUs."""
    task = scaling_task(num_tables, num_gpus, seed=SEED)
    topology = dataclasses.replace(
        task.topology,
        local_world_size=min(num_gpus, GPUS_OF_HOST),
        inter_host_bytes_per_s=None,
    )
    on_gpus = on_device(dataclasses.replace(task, topology=topology), "cuda")
    return BenchmarkTask(f"{num_tables} tables, {num_gpus} GPUs", on_gpus)


def throughput_gain(cost_ms: float, random_ms: float) -> float:
    """Return the gain over random if the rest of the step is that of the paper's model."""
    rest_ms = REST * random_ms
    return (rest_ms + random_ms) / (rest_ms + cost_ms) - 1
