"""The plans of a simulation, which are kept in its folder until it goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.files.errors import InfeasibleTaskError, ShardingError, UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.simulation.files import folder_of

log = logging.getLogger("dlrm_sharded.simulate")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan of one sharder, and its report."""

    sharder: str
    plan: ShardingPlan
    report: PlanReport

    @property
    def predicted(self) -> PlanCost:
        """Predicted cost of the plan; planners without a cost model are refused."""
        assert self.report.cost is not None
        return self.report.cost


def plans_of(
    planners: Mapping[str, Planner], task: ShardingTask, out: Path
) -> tuple[list[Planned], dict[str, str]]:
    """Return the plans of the sharders that find one, and the messages of those that do not.

    Raises:
        InfeasibleTaskError: no sharder finds a plan.
    """
    planned: list[Planned] = []
    failed: dict[str, str] = {}
    for name, planner in planners.items():
        path = folder_of(out, name) / "plan.json"
        path.parent.mkdir(exist_ok=True)
        try:
            plan, report = _kept_plan(path, planner, task) or planner.plan(task)
        except ShardingError as error:
            failed[name] = str(error)
            log.warning("%s: no plan: %s", name, error)
            continue
        write_json(path, plan_json(plan, report))
        log.info("%s: %d shards in %.1f s", name, len(plan.shards), report.solve_s)
        planned.append(Planned(name, plan, report))
    if not planned:
        reasons = "; ".join(f"{name}: {message}" for name, message in failed.items())
        raise InfeasibleTaskError(f"no sharder found a plan: {reasons}")
    return planned, failed


def _kept_plan(
    path: Path, planner: Planner, task: ShardingTask
) -> tuple[ShardingPlan, PlanReport] | None:
    """Return the plan that an interrupted simulation has made; None if there is none."""
    if not path.exists():
        return None
    try:
        fields = read_json_object(path, noun="plan")
        plan = ShardingPlan.from_json(fields)
        solve_s = float(fields.get("solve_s") or 0.0)
        return planner.adopt(plan, task, solve_s=solve_s)
    except (UserError, TypeError, ValueError) as error:
        log.warning("%s cannot be used and is made anew: %s", path, error)
        return None
