"""Makes the plan of a run, or keeps the one of an interrupted run, and checks its memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dlrm_sharded.checkpoint.folder import set_aside
from dlrm_sharded.cost.cost_model_file import cost_model_beside, write_cost_model
from dlrm_sharded.explain.text import plan_lines
from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.files.json_files import replace_file, write_json
from dlrm_sharded.job.memory_check import CheckedMemory, check_memory
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.job.start import note_start
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.agreement import patiently_on_rank_zero

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a run, with the memory that its ranks need.

    Args:
        task: the run's task, whose tables have the plan's precisions.
        is_new: whether the plan differs from the plan of the checkpoint, or there is none.
    """

    plan: ShardingPlan
    report: PlanReport
    task: ShardingTask
    is_new: bool
    memory: CheckedMemory


def choose_plan(prepared: Prepared) -> Planned:
    """Make the plan on rank 0, unless the run continues with the plan of its checkpoint.

    Raises:
        ShardingError: there is no plan, or its ranks need more memory than is available.
    """
    plan, report = patiently_on_rank_zero(lambda: _chosen(prepared))
    memory = check_memory(prepared, plan)
    task, is_new = with_precisions(prepared.task, plan), plan != prepared.start.checkpoint_plan()
    return Planned(plan, report, task, is_new, memory)


def write_start(prepared: Prepared, planned: Planned) -> None:
    """Write to the run's folder what is known before the first step; rank 0 calls this.

    Files that an interrupted run wrote after its checkpoint are removed.
    """
    folder, start, task = prepared.folder.path, prepared.start, prepared.task
    prepared.folder.check_owner()
    for name, text in prepared.settings.config_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_file(folder / name, text.encode())
    write_json(folder / "plan.json", plan_json(planned.plan, planned.report))
    write_json(folder / "task.json", task.to_json())
    assert prepared.planner is not None
    write_cost_model(cost_model_beside(folder / "plan.json"), prepared.planner.cost_model)
    planned.memory.write(folder)
    if not prepared.settings.dry_run:
        for path in start.damaged:
            set_aside(path)
        note_start(folder, start, task.topology.world_size)
        prepared.folder.push()


def _chosen(prepared: Prepared) -> tuple[ShardingPlan, PlanReport]:
    """Make or keep the plan, and log its predicted cost; rank 0 calls this."""
    task, resumed, planner = prepared.task, prepared.start.resumed, prepared.planner
    text = "%d tables, %.2f GiB, on %d ranks of %s; global batch %d"
    ranks = (task.topology.world_size, task.topology.rank_memory_text)
    log.info(text, len(task.tables), task.table_bytes / GIB, *ranks, task.batch_size)
    assert planner is not None
    chosen = None
    kept = prepared.start.plan_to_keep(prepared.settings.config, task.topology.world_size)
    if kept is not None and resumed is not None:
        try:
            chosen = planner.adopt(kept, task, solve_s=resumed.state.plan["solve_s"])
            log.info("the run keeps the plan of its checkpoint, made earlier:")
        except InvalidPlanError as error:
            log.warning("the checkpoint's plan no longer fits: %s; a new one is made", error)
    plan, report = chosen or planner.plan(task)
    for line in plan_lines(plan, report, task):
        log.info("%s", line)
    if plan.half_tables() and task.topology.compute_device == "cpu":
        log.warning(
            "on CPUs, FBGEMM rounds weights in fp16 to the nearest number, so updates below a "
            "2000th of a weight are lost; on GPUs it rounds stochastically"
        )
    return plan, report
