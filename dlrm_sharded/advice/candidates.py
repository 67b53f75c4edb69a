"""Candidates: the predicted steps of cases, and the reasons why some have none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.advice.machines import Machine
from dlrm_sharded.cost.base import price
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.step.parts import (
    ALL_REDUCE,
    DENSE_BACKWARD,
    DENSE_FORWARD,
    EXCHANGES,
    OPTIMIZER,
    WAITING,
    DenseTimes,
)
from dlrm_sharded.step.prediction import COMPOSITION_ERROR, DensePart, predict_step
from dlrm_sharded.step.schedule import PIPELINED, SERIAL

GROUPS = {
    "lookups": COMPUTE_STAGES,
    "exchanges": EXCHANGES,
    "dense": (DENSE_FORWARD, DENSE_BACKWARD, OPTIMIZER),
    "waiting": (WAITING,),
}
"""Parts of the step that a table shows together; what little is left belongs to none."""


@dataclass(frozen=True, slots=True)
class Case:
    """A machine, a number of ranks and a sharder."""

    machine: Machine
    num_ranks: int
    sharder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The predicted step of a case, and its plan.

    Args:
        parts_ms: `step.parts.PARTS`, averaged over all ranks; they sum to the step.
        error: expected relative error of the step; None if it is not known.
        cost_error: the same of the plan's cost.
        dense_error: the same of the dense part.
        embedding_ms: the plan's cost.
        standing: origin of the prices.
        cached_bytes: memory of tables in host memory whose rows GPUs cache in part.
        plan: plan.json.
    """

    parts_ms: Mapping[str, float]
    error: float | None
    cost_error: float | None
    dense_error: float
    embedding_ms: float
    standing: Standing | None
    solve_s: float
    cached_bytes: int
    plan: Mapping[str, Any]

    @property
    def step_ms(self) -> float:
        return sum(self.parts_ms.values())


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a case has no outcome.

    Args:
        missing_bytes: memory that the tables need beyond that of all ranks; 0 if memory is not the
            reason.
    """

    reason: str
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A case with its outcome, or with the reason why it has none.

    Args:
        batch_size: global.
        task: None if there is none.
    """

    case: Case
    batch_size: int
    task: ShardingTask | None
    result: Outcome | Failure

    @property
    def outcome(self) -> Outcome:
        """The outcome, of a candidate that has one."""
        assert isinstance(self.result, Outcome)
        return self.result

    @property
    def is_feasible(self) -> bool:
        return isinstance(self.result, Outcome)

    @property
    def samples_per_s(self) -> float:
        return 1e3 * self.batch_size / self.outcome.step_ms

    def hours(self, samples: float) -> float:
        """Return the time in which so many samples are trained on."""
        return samples / self.samples_per_s / 3600

    def price(self, samples: float) -> float | None:
        """Return the price of training on so many samples; None if that of ranks is not known."""
        per_hour = self.case.machine.price
        return None if per_hour is None else per_hour * self.case.num_ranks * self.hours(samples)

    def share(self, part: str) -> float:
        """Return the part of the step that goes to one of its parts."""
        return self.outcome.parts_ms[part] / self.outcome.step_ms

    def group_share(self, group: str) -> float:
        """Return the same for one of `GROUPS`."""
        return sum(self.share(part) for part in GROUPS[group])


def evaluate(
    case: Case,
    planner: Planner,
    task: ShardingTask,
    dense: DenseTimes,
    *,
    dense_error: float,
    seed: int,
) -> Outcome | Failure:
    """Plan a case and predict its step."""
    try:
        plan, report = planner.plan(task)
    except InfeasibleTaskError as error:
        missing = task.table_bytes - sum(task.topology.rank_memory_bytes)
        return Failure(str(error), max(missing, 0))
    priced = price(planner.cost_model, task)
    if priced is None or report.cost is None:
        raise ConfigError("advice needs prices of exchanges: cost_model=learned")
    all_reduce_ms = priced.all_reduce_ms(dense.gradient_bytes)
    step = predict_step(
        report.cost,
        DensePart((dense,) * case.num_ranks, all_reduce_ms, dense_error),
        overlap=PIPELINED if case.machine.is_gpu else SERIAL,
        batch_size=task.batch_size,
        seed=seed,
    )
    parts_ms = step.breakdown.mean_parts_ms
    cost_error = report.standing.error if report.standing else None
    return Outcome(
        parts_ms=parts_ms,
        error=_error(
            step.step_ms,
            priced_ms=report.cost.critical_path_ms + parts_ms[ALL_REDUCE],
            dense_ms=dense.total_ms,
            cost_error=cost_error,
            dense_error=dense_error,
        ),
        cost_error=cost_error,
        dense_error=dense_error,
        embedding_ms=report.cost.cost_ms,
        standing=report.standing,
        solve_s=report.solve_s,
        cached_bytes=_cached_bytes(report),
        plan=plan_json(plan, report),
    )


def _error(
    step_ms: float,
    *,
    priced_ms: float,
    dense_ms: float,
    cost_error: float | None,
    dense_error: float,
) -> float | None:
    """Return the expected relative error of a step.

    It is that of `predict_step`, but the all-reduce of the dense part is not measured here.

    Args:
        priced_ms: what the cost model predicts: the plan's critical path and the all-reduce.
    """
    if cost_error is None:
        return None
    priced, dense = (min(1.0, part_ms / step_ms) for part_ms in (priced_ms, dense_ms))
    return math.hypot(priced * cost_error, dense * dense_error, COMPOSITION_ERROR)


def _cached_bytes(report: PlanReport) -> int:
    return 0 if report.cached is None else sum(report.cached.host_bytes_by_rank)
