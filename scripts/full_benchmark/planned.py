"""Every sharder on the same tasks, which no price was fitted on: plans, costs, bounds and times."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator

from benchmarks.compared import on_device, planner_of, quiet
from benchmarks.plans import Outcome, outcome
from benchmarks.priors import mlperf_task
from dlrm_sharded.advice.workers import Refusal, in_processes
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.sharders.planning import Planner
from full_benchmark.sizes import ALL_SHARDERS, FULL, SMALL, Sizes
from studies.study import Case, Row, StudyRun

MLPERF = "mlperf"
PAPER_ON_GPUS = "paper_on_gpus"
GPUS = {PAPER_ON_GPUS: "a100_sxm_80gb", MLPERF: "h100_sxm"}
"""GPUs by whose priors the sets of tasks are priced that are not for this machine."""

MLPERF_BATCH_SIZES = {8: 55_296, 16: 65_536}
MLPERF_BATCH_SIZE = 135_168
"""Global batch sizes of MLPerf's submissions; the second one is that of more GPUs."""

SEED = 2026
"""Seed of the tasks, which is not that of any task that a policy was trained on."""

LIMIT_S = 30.0
"""Time after which a sharder counts as one that finds no plan."""

VARIANTS = ("torchrec_calibrated", "torchrec_blind", "torchrec_dp")
WITHOUT_VARIANTS = ("feasibility", "models", "scale")
"""Sharders that share TorchRec's search, and sets on which only torchrec stands for them, because
that search takes long there."""


def run(study: StudyRun) -> None:
    study.rows(_cases(SMALL if study.small else FULL), "predicted")


def _cases(sizes: Sizes) -> Iterator[Case]:
    sets = {
        **sizes.planned,
        PAPER_ON_GPUS: sizes.planned["paper"],
        MLPERF: tuple(range(len(sizes.mlperf_ranks))),
    }
    for task_set, numbers in sets.items():
        for number in numbers:
            for sharder in ALL_SHARDERS:
                if task_set in WITHOUT_VARIANTS and sharder in VARIANTS:
                    continue
                yield Case(
                    f"{task_set}/{number}/{sharder}",
                    functools.partial(_run, task_set, number, sharder, sizes.mlperf_ranks),
                )


def _run(task_set: str, number: int, sharder: str, mlperf_ranks: tuple[int, ...]) -> list[Row]:
    quiet()
    gpu = GPUS.get(task_set)
    if task_set == MLPERF:
        benchmark_task = _mlperf(mlperf_ranks[number])
    elif task_set == PAPER_ON_GPUS:
        benchmark_task = _task("paper", number, "cuda")
    else:
        benchmark_task = _task(task_set, number, "cpu")
    found = outcome_in_time(number, benchmark_task, sharder, planner_on(sharder, gpu))
    memory = benchmark_task.task.topology.memory_bytes
    return [{"set": task_set, "gpu": gpu, "memory_bytes": memory} | dataclasses.asdict(found)]


def outcome_in_time(
    number: int,
    benchmark_task: BenchmarkTask,
    sharder: str,
    planner: Planner,
    *,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Plan a task in a limited time; a sharder that takes longer or fails has found no plan."""
    started = time.perf_counter()
    [found] = in_processes(
        [lambda: outcome(number, benchmark_task, sharder, planner)], limit_s=limit_s, num_workers=1
    )
    if not isinstance(found, Refusal):
        return found
    seconds = time.perf_counter() - started
    return Outcome.for_task(number, benchmark_task, sharder, solve_s=seconds, error=found.message)


@functools.cache
def planner_on(sharder: str, gpu: str | None) -> Planner:
    if gpu is None:
        return planner_of(sharder, device="cpu")
    return planner_of(sharder, device="cuda", hardware=Hardware(gpu_specs()[gpu].device_name))


@functools.cache
def _task(task_set: str, number: int, device: str) -> BenchmarkTask:
    benchmark_task = TASK_SETS[task_set](SEED, num=number + 1)[number]
    return dataclasses.replace(benchmark_task, task=on_device(benchmark_task.task, device))


@functools.cache
def _mlperf(num_gpus: int) -> BenchmarkTask:
    batch_size = MLPERF_BATCH_SIZES.get(num_gpus, MLPERF_BATCH_SIZE)
    task = mlperf_task(num_gpus, batch_size, gpu_specs()[GPUS[MLPERF]])
    return BenchmarkTask(f"{num_gpus} GPUs", on_device(task, "cuda"))
