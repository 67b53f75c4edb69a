"""The plans of a simulation, which are kept in its folder until it goes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from dlrm_sharded.files.errors import InfeasibleTaskError, ShardingError, UserError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.simulation.planned import Planned
from dlrm_sharded.simulation.store import folder_of

log = logging.getLogger("dlrm_sharded.simulate")


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
            found = _kept_plan(path, name, planner, task) or Planned(name, *planner.plan(task))
        except ShardingError as error:
            failed[name] = str(error)
            log.warning("%s: no plan: %s", name, error)
            continue
        write_json(path, plan_json(found.plan, found.report))
        log.info("%s: %d shards in %.1f s", name, len(found.plan.shards), found.report.solve_s)
        planned.append(found)
    if not planned:
        reasons = "; ".join(f"{name}: {message}" for name, message in failed.items())
        raise InfeasibleTaskError(f"no sharder found a plan: {reasons}")
    return planned, failed


def _kept_plan(path: Path, name: str, planner: Planner, task: ShardingTask) -> Planned | None:
    """Return the plan that an interrupted simulation has made; None if there is none."""
    if not path.exists():
        return None
    try:
        fields = read_json_object(path, noun="plan")
        solve_s = float(fields.get("solve_s") or 0.0)
        return Planned(name, *planner.adopt(ShardingPlan.from_json(fields), task, solve_s=solve_s))
    except (UserError, TypeError, ValueError) as error:
        log.warning("%s cannot be used and is made anew: %s", path, error)
        return None
