"""Makes the plan of a run, or keeps the one of an interrupted run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from dlrm_sharded.commands.start import Start
from dlrm_sharded.explain.text import cached_text, forecast, halves, profile_value_text, replicas
from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.sharders.planning import Planner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a run.

    Args:
        is_new: whether the run begins with it, or goes on with another plan than before.
    """

    plan: ShardingPlan
    report: PlanReport
    is_new: bool


def plan_run(planner: Planner | None, task: ShardingTask, start: Start, cfg: DictConfig) -> RunPlan:
    """Make the plan on rank 0, unless the run goes on with the one that it has.

    Raises:
        ShardingError: there is no plan.
    """
    assert planner is not None
    topology = task.topology
    log.info(
        "%d tables, %.2f GiB, on %d ranks of %s; global batch %d",
        len(task.tables),
        task.table_bytes / GIB,
        topology.world_size,
        topology.rank_memory_text,
        task.batch_size,
    )
    plan, report = _kept_or_new(planner, task, start, cfg)
    shards = f"{len(plan.shards)} shards{replicas(plan)}{halves(plan)}"
    summary_of_plan = f"{report.sharder}: {shards} in {report.solve_s:.3f} s"
    log.info("%s", "; ".join(filter(None, [summary_of_plan, forecast(report)])))
    if plan.half_tables() and topology.compute_device == "cpu":
        log.warning(
            "on CPUs, FBGEMM rounds weights in fp16 to the nearest number, so that updates below "
            "a 2000th of a weight are lost; on GPUs it rounds at random"
        )
    if report.cached is not None:
        log.info("%s", cached_text(report.cached))
    if report.profile_value is not None:
        log.info("%s", profile_value_text(report.profile_value))
    if report.standing is not None:
        log.info("prices: %s", report.standing.text)
    before = None if start.resumed is None else ShardingPlan.from_json(start.resumed.state.plan)
    return RunPlan(plan, report, is_new=plan != before)


def write_plan(run_dir: Path, run_plan: RunPlan, task: ShardingTask) -> None:
    """Write plan.json and task.json."""
    write_json(run_dir / "plan.json", plan_json(run_plan.plan, run_plan.report))
    write_json(run_dir / "task.json", task.to_json())


def _kept_or_new(
    planner: Planner, task: ShardingTask, start: Start, cfg: DictConfig
) -> tuple[ShardingPlan, PlanReport]:
    kept = start.plan_to_keep(cfg, task.topology.world_size)
    if kept is not None and start.resumed is not None:
        try:
            adopted = planner.adopt(kept, task, solve_s=start.resumed.state.plan["solve_s"])
        except InvalidPlanError as error:
            log.warning("the checkpoint's plan does not fit any more: %s; a new one is made", error)
        else:
            log.info("the run goes on with the plan of its checkpoint")
            return adopted
    return planner.plan(task)
