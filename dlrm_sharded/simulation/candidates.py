"""Candidates: each machine with each number of ranks and each sharder, and the predicted step."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrm_sharded.cost.base import price
from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.dense.model import DenseModel
from dlrm_sharded.dense.work_trace import DenseWork
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.workers import Refusal, in_processes
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.simulation.machines import Machine
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.step.parts import (
    ALL_REDUCE,
    DENSE_BACKWARD,
    DENSE_FORWARD,
    EXCHANGES,
    HOST_WAIT,
    OPTIMIZER,
    PARTS,
    WAITING,
    DenseTimes,
)
from dlrm_sharded.step.prediction import StepPrediction, step_error
from dlrm_sharded.step.schedule import PIPELINED, SERIAL

GROUPS = {
    "lookups": COMPUTE_STAGES,
    "exchanges": EXCHANGES,
    "dense": (DENSE_FORWARD, DENSE_BACKWARD, OPTIMIZER),
    "waiting": (WAITING,),
    "host": (HOST_WAIT,),
}
"""Parts of the step that a table shows together; what little is left belongs to none."""

MEASURE_LIMIT_S = 120.0
"""Time in which the dense part of one case must have been measured."""

LEAST_BOX_S, MOST_BOX_S = 5.0, 60.0
"""Limits of the time that one case may take."""


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, a number of ranks and a sharder, with their task.

    Args:
        batch_size: global.
        task: the reason in its place if the ranks cannot be, or cannot train it.
    """

    machine: Machine
    num_ranks: int
    sharder: str
    batch_size: int
    task: ShardingTask | Refusal

    @property
    def curve(self) -> tuple[str, str]:
        """Machine and sharder, which cases of several sizes have in common."""
        return self.machine.name, self.sharder


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plan of a case and its predicted step."""

    planned: Planned
    step: StepPrediction

    @property
    def cached_bytes(self) -> int:
        """Memory of tables in host memory whose rows GPUs cache in part."""
        cached = self.planned.report.cached
        return 0 if cached is None else sum(cached.host_bytes_by_rank)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A case with its outcome, or with the reason why it has none."""

    case: Case
    result: Outcome | Refusal

    @property
    def outcome(self) -> Outcome:
        """The outcome, of a candidate that has one."""
        assert isinstance(self.result, Outcome)
        return self.result

    @property
    def is_feasible(self) -> bool:
        return isinstance(self.result, Outcome)

    @property
    def task(self) -> ShardingTask:
        """The task, of a candidate that has one."""
        assert isinstance(self.case.task, ShardingTask)
        return self.case.task

    @property
    def step_ms(self) -> float:
        return self.outcome.step.step_ms

    @property
    def samples_per_s(self) -> float:
        return self.outcome.step.samples_per_s

    @property
    def missing_bytes(self) -> int:
        """Memory that the tables need beyond that of all ranks; 0 if memory is not the reason."""
        if not (isinstance(self.result, Refusal) and self.result.is_infeasible):
            return 0
        return max(0, self.task.table_bytes - sum(self.task.topology.rank_memory_bytes))

    def hours(self, samples: float) -> float:
        """Return the time in which so many samples are trained on."""
        return samples / self.samples_per_s / 3600

    def price(self, samples: float) -> float | None:
        """Return the price of training on so many samples; None if that of ranks is not known."""
        per_hour = self.case.machine.price
        return None if per_hour is None else per_hour * self.case.num_ranks * self.hours(samples)

    def group_share(self, group: str) -> float:
        """Return the part of the step that goes to one of `GROUPS`."""
        parts_ms = self.outcome.step.breakdown.mean_parts_ms
        return sum(parts_ms[part] / self.step_ms for part in GROUPS[group])

    def to_json(self, samples: float | None) -> dict[str, Any]:
        """Return a flat object; unknown values are null.

        Args:
            samples: samples of an epoch, to which hours and price belong; None if not known.
        """
        case, result = self.case, self.result
        row: dict[str, Any] = {
            "hardware": case.machine.name,
            "gpu": None if case.machine.spec is None else case.machine.spec.key,
            "ranks": case.num_ranks,
            "sharder": case.sharder,
            "batch_size": case.batch_size,
            "fits": self.is_feasible,
            **dict.fromkeys(("reason", "missing_bytes", "cached_bytes", "step_ms")),
            **dict.fromkeys(("device_ms", "host_ms", "host_source")),
            **dict.fromkeys(("samples_per_s", "error", "embedding_ms", "hours", "price")),
            "solve_s": None,
            **dict.fromkeys(f"{part}_ms" for part in PARTS),
        }
        if isinstance(result, Refusal):
            return row | {"reason": result.message, "missing_bytes": self.missing_bytes}
        if samples is not None:
            row |= {"hours": self.hours(samples), "price": self.price(samples)}
        parts_ms = result.step.breakdown.mean_parts_ms
        return row | {
            "cached_bytes": result.cached_bytes,
            "step_ms": self.step_ms,
            "device_ms": result.step.device_ms,
            "host_ms": result.step.host_ms,
            "host_source": result.step.host and result.step.host.source,
            "samples_per_s": self.samples_per_s,
            "error": result.step.error,
            "embedding_ms": result.planned.cost.cost_ms,
            "solve_s": result.planned.report.solve_s,
            **{f"{part}_ms": ms for part, ms in parts_ms.items()},
        }


_Ranks = tuple[RunContext, DenseTimes]
"""Returns what the ranks of a case compute on, and the times of their dense part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The cases to compare, and what their steps follow from.

    Args:
        context_of: returns the hardware of a case's ranks. For ranks on this machine, it is called
            in a process of its own, which then has the threads of one rank.
        planner_of: returns the planner of a case, whose sharder ends within some seconds.
    """

    cases: Sequence[Case]
    context_of: Callable[[Case, ShardingTask], RunContext]
    planner_of: Callable[[Case, RunContext, float], Planner]
    dense: DenseModel
    seed: int

    def candidates(self, *, seconds: float, num_workers: int) -> list[Candidate]:
        """Return the candidates of all cases, in their order.

        Args:
            seconds: time for all plans together, see `LEAST_BOX_S`.
            num_workers: cases that are evaluated at once.
        """
        started = time.monotonic()
        with ProgressBar(total=len(self.cases), desc="planning", unit="case") as bar:
            ranks = list(zip(self.cases, self._ranks(), strict=True))
            planned = [(case, found) for case, found in ranks if not isinstance(found, Refusal)]
            left_s = seconds - (time.monotonic() - started)
            box_s = min(max(left_s * num_workers / max(len(planned), 1), LEAST_BOX_S), MOST_BOX_S)
            bar.update(len(ranks) - len(planned))
            outcomes = in_processes(
                [functools.partial(self._outcome, *entry, box_s) for entry in planned],
                limit_s=box_s,
                num_workers=num_workers,
                done=lambda index, result: bar.update(),
            )
        rest = iter(outcomes)
        return [
            Candidate(case, found if isinstance(found, Refusal) else next(rest))
            for case, found in ranks
        ]

    def _ranks(self) -> list[_Ranks | Refusal]:
        """Return the ranks of all cases; what is measured runs alone, and once."""
        measured: dict[tuple[int, int], _Ranks | Refusal] = {}
        works: dict[int, DenseWork] = {}
        found: list[_Ranks | Refusal] = []
        for case in self.cases:
            task = case.task
            if isinstance(task, Refusal):
                found.append(task)
                continue
            local_batch_size = task.batch_size // case.num_ranks
            if case.machine.spec is not None:
                if local_batch_size not in works:
                    works[local_batch_size] = self.dense.work(task.tables, local_batch_size)
                dense = self.dense.priced(case.machine.spec, works[local_batch_size])
                found.append((self.context_of(case, task), dense))
                continue
            key = (local_batch_size, task.topology.ranks_per_host)
            if key not in measured:
                measure = functools.partial(self._measured, case, task)
                [measured[key]] = in_processes([measure], limit_s=MEASURE_LIMIT_S, num_workers=1)
            found.append(measured[key])
        return found

    def _measured(self, case: Case, task: ShardingTask) -> _Ranks:
        """Measure one rank of this machine, with the threads that it has beside the others."""
        context = self.context_of(case, task)
        batch = self.dense.random_batch(task.batch_size // case.num_ranks)
        return context, self.dense.measured(task.tables, [batch], torch.device("cpu"))

    def _outcome(self, case: Case, ranks: _Ranks, box_s: float) -> Outcome:
        """Plan a case and predict its step; errors say why there is none."""
        context, dense = ranks
        planner, task = self.planner_of(case, context, box_s), case.task
        assert isinstance(task, ShardingTask)
        planned = Planned(case.sharder, *planner.plan(task))
        priced = price(planner.cost_model, task)
        if priced is None or planned.report.cost is None:
            raise ConfigError("advice needs prices of exchanges: cost_model=learned")
        cluster = Cluster.of_equal_ranks(
            task,
            dense,
            priced=priced,
            dense_error=case.machine.dense_error,
            overlap=PIPELINED if case.machine.is_gpu else SERIAL,
            seed=self.seed,
        )
        step = cluster.step(planned.plan, planned.cost)
        if planned.cost_error is None:
            return Outcome(planned, step)
        # unlike that of a run, the all-reduce is predicted by the cost model too
        priced_ms = planned.cost.critical_path_ms + step.breakdown.mean_ms(ALL_REDUCE)
        error = step_error(
            step,
            priced=(priced_ms, planned.cost_error),
            dense=(dense.total_ms, case.machine.dense_error),
        )
        return Outcome(planned, dataclasses.replace(step, error=error))


def no_outcome(candidates: Sequence[Candidate]) -> InfeasibleTaskError:
    """Return the error of candidates that all have no outcome.

    It names the memory that the largest size of every machine lacks.
    """
    lines = {}
    for candidate in candidates:
        case, result = candidate.case, candidate.result
        assert isinstance(result, Refusal)
        reason = result.message
        if missing_bytes := candidate.missing_bytes:
            size, missing = candidate.task.table_bytes / GIB, missing_bytes / GIB
            most = f"{case.num_ranks} rank{'s' * (case.num_ranks > 1)}"
            reason = f"{size:,.1f} GiB of tables exceed the memory of {most} by {missing:,.1f} GiB"
        lines[case.curve] = f"{', '.join(case.curve)}: {reason}"
    return InfeasibleTaskError(
        "no case has a plan; add ranks, raise topology.memory_gib, or ask for tables in host "
        "memory (sharder=neuroshard sharder.cache_tables=auto topology.host_memory_gib=...):\n  "
        + "\n  ".join(lines.values())
    )
