"""Measures this machine for commands that plan for it without running there: hardware=here."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from dlrm_sharded.commands.sharders import start_budget
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner, PlannerFactory, planners_for


def planners_here(
    cfg: DictConfig, context: RunContext, task: ShardingTask, factories: Sequence[PlannerFactory]
) -> Sequence[Planner]:
    """Return planners for ranks on this machine, which is measured first if they need it.

    A single rank measures lookups; exchanges keep the costs of the prior.
    """
    planners, budget_s = planners_for(context, factories), start_budget(cfg)
    if budget_s is None or not any(planner.uses_costs for planner in planners):
        return planners
    from dlrm_sharded.job.first_run import after_first_run  # which loads torch
    from dlrm_sharded.ranks.distributed import process_group

    with process_group() as rank:
        if rank.device.type != context.device:  # a task for CPUs, on a machine with a GPU
            return planners
        found = after_first_run(
            planners,
            rank,
            context,
            task,
            budget_s=budget_s,
            journal=cfg.journal,
            new_planners=lambda measured: planners_for(measured, factories),
        )
    assert found is not None, "the only rank is rank 0"
    return found
