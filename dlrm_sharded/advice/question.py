"""A question and its candidates: every machine with every number of ranks and every sharder."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dlrm_sharded.advice.candidates import Candidate, Case, Failure, Outcome, evaluate
from dlrm_sharded.advice.workers import Refusal, in_processes
from dlrm_sharded.dense.gpu_prices import DENSE_ERROR
from dlrm_sharded.dense.model import DenseModel
from dlrm_sharded.dense.work import DenseWork
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.process import threads_of_a_rank
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.step.parts import DenseTimes

MEASURE_LIMIT_S = 120.0
"""Time in which the dense part of one case must have been measured."""

LEAST_BOX_S, MOST_BOX_S = 5.0, 60.0
"""Limits of the time that one case may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The machines, sizes and sharders to compare.

    Args:
        cases: machines, sizes and sharders.
        batch_size_of: returns the global batch size of a number of ranks.
        tables_of: returns the tables, with their profile in global batches of a size.
        stated: what the user says of all ranks.
        optimizer: fused optimizer of the tables; None if it is not known.
        planner_of: returns the planner of a case, whose sharder ends within some seconds.
    """

    cases: Sequence[Case]
    batch_size_of: Callable[[int], int]
    tables_of: Callable[[int], tuple[Table, ...]]
    stated: Topology
    optimizer: str | None
    planner_of: Callable[[Case, RunContext, float], Planner]
    dense: DenseModel
    seed: int

    def task(self, case: Case) -> ShardingTask:
        """Return the task of a case; ConfigError if its ranks cannot be, or cannot train it."""
        topology = case.machine.topology(case.num_ranks, self.stated)
        batch_size = self.batch_size_of(case.num_ranks)
        return ShardingTask(self.tables_of(batch_size), topology, batch_size, self.optimizer)


def candidates_of(question: Question, *, seconds: float, num_workers: int) -> list[Candidate]:
    """Return the candidates of all cases, in their order.

    Args:
        seconds: time for all plans together, see `LEAST_BOX_S`.
        num_workers: cases that are evaluated at once.
    """
    started = time.monotonic()
    tasks: dict[Case, ShardingTask | Failure] = {}
    for case in question.cases:
        try:
            tasks[case] = question.task(case)
        except ConfigError as error:
            tasks[case] = Failure(str(error))
    with ProgressBar(total=len(question.cases), desc="planning", unit="case") as bar:
        dense = _dense_times(question, tasks)
        planned = [case for case in question.cases if case in dense]
        left_s = seconds - (time.monotonic() - started)
        box_s = min(max(left_s * num_workers / max(len(planned), 1), LEAST_BOX_S), MOST_BOX_S)
        bar.update(len(question.cases) - len(planned))
        results = in_processes(
            [functools.partial(_evaluate, question, case, dense[case], box_s) for case in planned],
            limit_s=box_s,
            num_workers=num_workers,
            done=lambda _: bar.update(),
        )
    found = dict(zip(planned, results, strict=True))
    return [_candidate(question, case, tasks[case], found.get(case)) for case in question.cases]


def no_outcome(candidates: Sequence[Candidate]) -> InfeasibleTaskError:
    """Return the error of candidates that all have no outcome.

    It names the memory that the largest size of every machine lacks.
    """
    lines = {}
    for candidate in candidates:
        assert isinstance(candidate.result, Failure)
        case, failure = candidate.case, candidate.result
        reason = failure.reason
        if failure.missing_bytes and candidate.task is not None:
            size, missing = candidate.task.table_bytes / GIB, failure.missing_bytes / GIB
            most = f"{case.num_ranks} rank{'s' * (case.num_ranks > 1)}"
            reason = f"{size:,.1f} GiB of tables exceed the memory of {most} by {missing:,.1f} GiB"
        lines[case.machine.name, case.sharder] = f"{case.machine.name}, {case.sharder}: {reason}"
    return InfeasibleTaskError(
        "no case has a plan; add ranks, raise topology.memory_gib, or ask for tables in host "
        "memory (sharder=neuroshard sharder.cache_tables=auto topology.host_memory_gib=...):\n  "
        + "\n  ".join(lines.values())
    )


def _dense_times(
    question: Question, tasks: dict[Case, ShardingTask | Failure]
) -> dict[Case, DenseTimes]:
    """Return the dense parts of all cases that have a task; what is measured runs alone."""
    works: dict[int, DenseWork] = {}
    found: dict[Case, DenseTimes] = {}
    measured: dict[tuple[int, int], DenseTimes | Refusal] = {}
    for case, task in tasks.items():
        if isinstance(task, Failure):
            continue
        local_batch_size = task.batch_size // case.num_ranks
        if case.machine.spec is not None:
            if local_batch_size not in works:
                works[local_batch_size] = question.dense.work(task.tables, local_batch_size)
            found[case] = question.dense.priced(case.machine.spec, works[local_batch_size])
            continue
        key = (local_batch_size, task.topology.ranks_per_host)
        if key not in measured:
            measure = functools.partial(_measured, question.dense, task)
            [measured[key]] = in_processes([measure], limit_s=MEASURE_LIMIT_S, num_workers=1)
        times = measured[key]
        if isinstance(times, Refusal):
            tasks[case] = Failure(f"the dense part cannot be measured: {times.message}")
        else:
            found[case] = times
    return found


def _measured(dense: DenseModel, task: ShardingTask) -> DenseTimes:
    """Measure the dense part of one rank here, with the threads that it has beside the others."""
    topology = task.topology
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of_a_rank(topology.ranks_per_host))
    batch = dense.random_batch(task.batch_size // topology.world_size)
    return dense.measured(task.tables, [batch], torch.device("cpu"))


def _evaluate(question: Question, case: Case, dense: DenseTimes, box_s: float) -> Outcome | Failure:
    task = question.task(case)
    planner = question.planner_of(case, case.machine.context(task.topology), box_s)
    dense_error = DENSE_ERROR if case.machine.is_gpu else 0.0
    return evaluate(case, planner, task, dense, dense_error=dense_error, seed=question.seed)


def _candidate(
    question: Question,
    case: Case,
    task: ShardingTask | Failure,
    found: Outcome | Failure | Refusal | None,
) -> Candidate:
    batch_size = question.batch_size_of(case.num_ranks)
    if isinstance(task, Failure):
        return Candidate(case, batch_size, None, task)
    assert found is not None
    if isinstance(found, Refusal):
        found = Failure(found.message)
    return Candidate(case, batch_size, task, found)
