"""Plan a task, without training and without a GPU: the command `dlrm-plan`.

dlrm-plan task=task.json sharder=torchrec out=plan.json
dlrm-plan data=criteo_kaggle topology.world_size=8 topology.memory_gib=60 out=plan.json
"""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from dlrm_sharded.commands.asked_task import HERE, LINKS, asked_task, unused_of_costs
from dlrm_sharded.commands.hydra_app import all_but, command_line, run_command
from dlrm_sharded.commands.sharders import planner_factory, run_context, start_budget
from dlrm_sharded.cost import gpu_prior
from dlrm_sharded.cost.base import is_additive
from dlrm_sharded.cost.cost_model_file import cost_model_beside, write_cost_model
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.explain.text import plan_lines, sections
from dlrm_sharded.files.errors import ConfigError, check_flag
from dlrm_sharded.files.json_files import (
    check_file_to_write,
    is_stream,
    read_json_object,
    write_json,
)
from dlrm_sharded.files.line_file import changed_settings
from dlrm_sharded.files.renamed import with_present_target
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport, plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner

KEYS_OF_RANKS = (
    *("world_size", "ranks_per_host", "compute_device", "memory_gib", "reserved_gib"),
    *LINKS,
)
"""Keys of a topology on which a plan depends; training has others, too."""

log = logging.getLogger("dlrm_sharded.plan")


def plan(cfg: DictConfig) -> None:
    """Plan the task or the data of a config, and write the plan."""
    logging.getLogger(gpu_prior.__name__).setLevel(logging.ERROR)  # the last line repeats it
    out, task_out = _files(cfg)
    check_flag("explain", cfg.explain)
    again = None if cfg.again is None else make_again(cfg, Path(cfg.again))
    task, dataset = asked_task(cfg)
    planner = _planner(cfg, task)
    if cfg.explain and not is_additive(planner.cost_model):
        raise ConfigError(
            "explain=true needs a cost model with a method `cost_task`: set cost_model=learned, or "
            "write that method"
        )
    plan, report = planner.plan(task)
    write_json(out, plan_json(plan, report))
    if not is_stream(out):
        write_cost_model(cost_model_beside(Path(out)), planner.cost_model)
    if task_out is not None:
        write_json(task_out, task.to_json())
    elif dataset is not None:
        log.info("task.json is not written, because out=%s has no folder; set task_out", out)
    for line in [*plan_lines(plan, report, task), f"wrote {out}"]:
        log.info("%s", line)
    if report.provenance is not None:
        log.info("cost model: %s", report.provenance.text)
    if again is not None:
        log.info("%s", _what_differs(plan, report, again, cfg.again))
    if report.diagnosis is not None:
        for title, lines in sections(report.diagnosis).items():
            log.info("%s", "\n  ".join([title, *lines]))
    if report.caveat is not None:
        log.warning("caveat: %s", report.caveat)


def _planner(cfg: DictConfig, task: ShardingTask) -> Planner:
    """Build the planner; with hardware=here, measure this machine first if its costs need it.

    A single rank measures lookups; exchanges keep the costs of the prior.
    """
    context = run_context(cfg.hardware, task, task.known_optimizer or cfg.optimizer.embedding)
    explained = functools.partial(diagnose, alternatives=True) if cfg.explain else None
    factory = planner_factory(cfg, diagnose=explained)
    planner, budget_s = factory.planner(context), start_budget(cfg)
    if cfg.hardware != HERE or budget_s is None or not planner.uses_costs:
        return planner
    from dlrm_sharded.job.first_measurement import with_measured_costs  # which loads torch
    from dlrm_sharded.ranks.distributed import process_group

    with process_group() as rank:
        if rank.device.type != context.device:  # a task for CPUs, on a machine with a GPU
            return planner
        found = with_measured_costs(
            planner,
            rank,
            context,
            task,
            budget_s=budget_s,
            journal=cfg.journal,
            new_planner=factory.planner,
        )
    assert found is not None, "the only rank is rank 0"
    return found


def _files(cfg: DictConfig) -> tuple[str, str | None]:
    """Return the file for the plan, and the file for the task of data, if there is one.

    Each plan of a sweep has its own files: plan_0.json, plan_1.json, ...

    Raises:
        ConfigError: a file cannot be written, or both files are the same.
    """
    check_file_to_write("out", cfg.out)
    out, task_out = str(cfg.out), cfg.task_out and str(cfg.task_out)
    if not is_stream(out):
        task_out = task_out or str(Path(out).with_name("task.json"))
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            number = HydraConfig.get().job.num
            out, task_out = (
                str(path.with_name(f"{path.stem}_{number}{path.suffix}"))
                for path in (Path(out), Path(task_out))
            )
    if cfg.get("data") is None or not task_out:
        return out, None
    check_file_to_write("task_out", task_out)
    if os.path.realpath(task_out) == os.path.realpath(out):
        raise ConfigError(f"the plan and its task would both be written to {out!r}; set task_out")
    return out, task_out


def make_again(cfg: DictConfig, path: Path) -> dict[str, Any]:
    """Set a config's sharder and cost model to those of an earlier plan, and return its JSON.

    A cost model on the command line takes precedence.

    Options that only an earlier release had are left out; `_what_differs` tells what that changes.

    Raises:
        ConfigError: the file has no plan, the plan does not say from what it was made, or its cost
            model is neither in a file beside it nor on the command line.
    """
    fields = read_json_object(path, noun="plan")
    made_from = fields.get("made_from")
    if not isinstance(made_from, dict) or not isinstance(made_from.get("sharder"), dict):
        raise ConfigError(f"{path} lacks made_from: an earlier version wrote it; make a new plan")
    named = any(override.key_or_group.split(".")[0] == "cost_model" for override in command_line())
    if made_from.get("prices_digest") is None and not named:
        raise ConfigError(
            f"{path} does not have its cost model, which is one of your own, neuroshard or none; "
            "name it with cost_model=, your own also with --config-dir"
        )
    with open_dict(cfg):
        cfg.sharder = with_present_target(made_from["sharder"])
        if (file := cost_model_beside(path)).exists() and not named:
            cfg.cost_model.artifact = str(file)
    return fields


def _what_differs(plan: ShardingPlan, report: PlanReport, before: dict[str, Any], path: str) -> str:
    """Return a text: whether a plan equals an earlier one, or else which of its inputs differ."""
    now = json.loads(json.dumps(plan_json(plan, report)))
    if all(now[key] == before.get(key) for key in ("shards", "predicted", "lower_bound_ms")):
        return f"the plan, its predicted cost and its bound equal those of {path}"
    why = changed_settings(before["made_from"], now["made_from"])
    same = "equals" if now["shards"] == before.get("shards") else "differs from"
    why = why or "the search stopped at another time, or the task differs"
    return f"the plan {same} that of {path}: {why}"


def unused(cfg: DictConfig) -> dict[str, str]:
    """Declare which keys have no effect on the plan of a config, and why."""
    reasons = unused_of_costs(cfg) | all_but(cfg, "optimizer", "embedding")
    reasons |= all_but(cfg, "topology", *KEYS_OF_RANKS)
    if cfg.task is not None:
        of_file = (
            f"the task is that of {cfg.task}; change it there, name data= in its place, or plan "
            f"for other ranks with dlrm-compare tasks={cfg.task} topologies=[...] ranks=[...]"
        )
        reasons |= dict.fromkeys(("topology", "batch_size", "task_out"), of_file)
    if cfg.again is not None:
        reasons["sharder"] = f"the plan of {cfg.again} is made again by its own sharder"
    drawing = [cfg.sharder if cfg.again is None else {}, cfg.get("data") or {}]
    draws = any("${seed}" in OmegaConf.to_yaml(node) for node in drawing)
    if not draws and HydraConfig.get().mode is not RunMode.MULTIRUN:  # others may draw
        reasons["seed"] = "the sharder draws nothing"
    return reasons


def main() -> None:
    run_command(plan, "plan", unused=unused)


if __name__ == "__main__":
    main()
