"""Plans cases, a task and a sharder each, in separate processes; a folder keeps their outcomes.

`cases.jsonl` has a line for each case that has ended, under the case's key, and
`plans/TASK/SHARDER.json` its plan. The same command goes on with what is missing or has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import logging
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.contest.forks import in_forks
from dlrm_sharded.cost.cost_model_file import costs_digest
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.files.errors import UserError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.line_file import LineFile
from dlrm_sharded.files.text_table import quantity
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner

CASES, PLANS = "cases.jsonl", "plans"

log = logging.getLogger("dlrm_sharded.compare")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a comparison is made and written.

    Args:
        margin: relative difference of predicted costs below which they are a tie.
        file_format: of the tables, csv or parquet.
    """

    out: Path
    reference: str
    margin: float
    num_workers: int
    limit_s: float
    file_format: str


@dataclass(frozen=True, slots=True)
class Case:
    """A task that a sharder is to plan.

    Args:
        task_name, sharder: their names in tables and paths.
        kind: group of the task within its set; "" if the set has none.
        costs_digest: hash of the cost model, the same for all sharders of a task.
        topology: name of the topology that the task was put on; "" for its own.
    """

    task_name: str
    sharder: str
    task: ShardingTask
    planner: Planner
    kind: str = ""
    costs_digest: str = ""
    topology: str = ""

    def key(self) -> str:
        """Return a hash of everything on which the plan and its cost depend."""
        return digest(
            [self.task_name, self.sharder, self.task.to_json(), self.costs_digest],
            source_digest(self.planner.sharder, self.planner.options),
            str(self.planner.exchange_precision),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plan that a sharder made for a task, or why it made none.

    Args:
        solve_s: time of the sharder; without a plan, the time until that was known.
        limit_s: time that it had.
        error: why there is no plan; None if there is one.
        cost: predicted cost of the plan, by the cost model that all sharders share.
        lower_bound_ms: lower bound of the cost of all plans, which this sharder's report proves.
    """

    solve_s: float
    limit_s: float
    error: str | None = None
    cost: PlanCost | None = None
    lower_bound_ms: float | None = None
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """A case and its outcome."""

    case: Case
    outcome: Outcome

    @property
    def plan(self) -> ShardingPlan:
        """The plan, without its exchange precision; it has no shards if the case has no plan."""
        return ShardingPlan(self.case.task.topology.world_size, self.outcome.shards)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The plans of a task, measured in the same rounds.

    Args:
        rounds_ms: by sharder, cost of its plan in every round.
        costs: by sharder, cost of its plan, with the medians of the rounds.
    """

    rounds_ms: Mapping[str, tuple[float, ...]]
    costs: Mapping[str, PlanCost]


def plan_path(out: Path, task: str, sharder: str) -> Path:
    """Return the path of the plan of a case; names that differ have different paths."""
    return out / PLANS / _file_name(task) / f"{_file_name(sharder)}.json"


def run_cases(cases: Sequence[Case], out: Path, *, limit_s: float, num_workers: int) -> list[Entry]:
    """Return the entries of all cases, in their order, and log how many the folder had.

    A case without a plan is reused, unless it had less time than it would have now.

    Args:
        limit_s: time limit of a case.
        num_workers: number of cases at once.

    Raises:
        OSError: the folder cannot be written.
    """
    file = LineFile(out / CASES, "case")
    by_key = {case.key(): case for case in cases}
    kept = dict(file.latest(_kept).values())
    found = {
        key: kept[key]
        for key, case in by_key.items()
        if key in kept and _is_usable(case, kept[key], out, limit_s)
    }
    missing = [key for key in by_key if key not in found]
    if found:
        log.info("reusing %d of %s from %s", len(found), quantity(len(cases), "case"), out)

    functions = [functools.partial(_outcome, by_key[key], limit_s=limit_s) for key in missing]
    for index, result in in_forks(functions, limit_s=limit_s, num_forks=num_workers):
        key, case = missing[index], by_key[missing[index]]
        if isinstance(result, str):
            result = Outcome(limit_s, limit_s, result), None
        outcome, plan = result
        if plan is not None:
            path = plan_path(out, case.task_name, case.sharder)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, plan)
        file.append({"key": key, "outcome": dataclasses.asdict(outcome)})
        found[key] = outcome
        cost = outcome.cost
        text = f"no plan: {outcome.error}" if cost is None else f"{cost.cost_ms:.2f} ms"
        name = f"{case.task_name}, {case.sharder}: {text}"
        log.info("%d of %d: %s, in %.1f s", len(found), len(cases), name, outcome.solve_s)
    log.info("%s planned", quantity(len(missing), "case"))
    return [Entry(case, found[key]) for key, case in by_key.items()]


def _file_name(name: str) -> str:
    safe = re.sub(r"[^\w.=,;-]+", "_", name)
    return safe if safe == name else f"{safe}-{digest(name)[:6]}"


def _kept(fields: Mapping[str, Any]) -> tuple[str, Outcome]:
    return str(fields["key"]), read_form(fields["outcome"], Outcome, name="an outcome")


def _is_usable(case: Case, outcome: Outcome, out: Path, limit_s: float) -> bool:
    if outcome.error is not None:
        return outcome.limit_s >= limit_s
    return plan_path(out, case.task_name, case.sharder).exists()


def _outcome(case: Case, *, limit_s: float) -> tuple[Outcome, dict[str, Any] | None]:
    """Plan a task; return the outcome, and the form of plan.json if there is a plan.

    The cost is predicted by the planner's cost model, whatever the sharder predicts.
    """
    began_s = time.perf_counter()
    try:
        plan, report = case.planner.plan(case.task)
    except Exception as error:  # a user's sharder may raise anything, and the others go on
        reason = str(error)
        if not isinstance(error, UserError):
            log.warning("%s", traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
        return Outcome(time.perf_counter() - began_s, limit_s, reason), None
    outcome = Outcome(
        solve_s=report.solve_s,
        limit_s=limit_s,
        cost=report.cost,
        lower_bound_ms=report.lower_bound_ms,
        shards=plan.shards,
    )
    return outcome, plan_json(plan, report)


def digest(*parts: Any) -> str:
    """Return a short hash of JSON."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_digest(made: object, options: Mapping[str, Any] | None) -> str:
    """Return a hash of an object's options and of the file of its class, which may change."""
    path = inspect.getsourcefile(type(made))
    source = Path(path).read_text(encoding="utf-8") if path else ""
    return digest(dict(options or {}), source)


def digest_of_costs(model: object, options: Mapping[str, Any] | None) -> str:
    """Return a hash of everything on which a cost model's predictions depend, as far as known."""
    if isinstance(model, LearnedCostModel):
        return costs_digest(model)
    return source_digest(model, options)
