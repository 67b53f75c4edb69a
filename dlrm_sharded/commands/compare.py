"""Compare the plans of several sharders on many tasks: the command `dlrm-compare`.

dlrm-compare sharders=[search,torchrec,size_lookup] tasks=FOLDER out=FOLDER
dlrm-compare preset=neuroshard_table_1 out=FOLDER
dlrm-compare tasks=task.json topologies=[h100_80gb,a100_80gb] ranks=[8,16,64] out=FOLDER
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from dlrm_sharded.commands.asked_task import unused_of_costs
from dlrm_sharded.commands.hydra_app import run_command
from dlrm_sharded.commands.sharders import (
    config_of_sharder,
    plain,
    planner_factory,
    quoted_list,
    run_context,
)
from dlrm_sharded.commands.topologies import ComparedTask, on_topologies
from dlrm_sharded.commands.words import checked_names, value_of
from dlrm_sharded.contest.cases import Case, Setting, digest_of_costs, run_cases
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import (
    ConfigError,
    check_choice,
    check_count,
    check_flag,
    check_number,
)
from dlrm_sharded.files.json_files import folder_to_write, write_json
from dlrm_sharded.files.line_file import locked
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.ranks.process import num_cores
from dlrm_sharded.sharders.planning import Planner, planners_for

FORMATS = ("csv", "parquet")

log = logging.getLogger("dlrm_sharded.compare")


def compare(cfg: DictConfig) -> None:
    """Plan all tasks of a config with all its sharders, and write the comparison."""
    named = value_of(cfg.sharders) if isinstance(cfg.sharders, str) else plain(cfg.sharders)
    sharders = checked_names("sharders", named, example="sharders=[search,'search;pin={a: [0]}']")
    setting = _setting(cfg, sharders)
    tasks = on_topologies(cfg, _tasks(cfg))
    if cfg.measured:
        from dlrm_sharded.contest import plan_measurements  # loads torch, which cases do not need

        for one in tasks:
            plan_measurements.check_measurable(one.name, one.task)
    cases = _cases(cfg, sharders, tasks)
    out = setting.out
    out.mkdir(parents=True, exist_ok=True)
    refusal = f"another process compares in out = {out}; wait for it, or name another folder"
    with locked(out / ".lock", refusal=refusal):
        if cfg.task_set is not None or cfg.topologies is not None:
            (out / "tasks").mkdir(exist_ok=True)
            for one in tasks:
                write_json(out / "tasks" / f"{one.name}.json", one.task.to_json())
        entries = run_cases(cases, out, limit_s=cfg.limit_s, num_workers=setting.num_workers)
        measurements = {}
        if cfg.measured:
            options = {key: cfg[key] for key in ("rounds", "iterations", "seed")}
            measurements = plan_measurements.measure_tasks(entries, out, **options)
        from dlrm_sharded.contest.summary import write_report  # loads polars and matplotlib

        for line in write_report(entries, measurements, setting):
            log.info("%s", line)


def _setting(cfg: DictConfig, sharders: Sequence[str]) -> Setting:
    """Check and return the settings of the comparison and its output."""
    check_flag("measured", cfg.measured)
    check_count("seed", cfg.seed, least=0)
    check_number("tie", cfg.tie, most=1.0)
    check_number("limit_s", cfg.limit_s, above=True)
    for key in ("rounds", "iterations"):
        check_count(key, cfg[key], least=1)
    for key in ("workers", "num"):
        if cfg[key] is not None:
            check_count(key, cfg[key], least=1)
    check_choice("format", cfg.format, FORMATS)
    reference = sharders[0] if cfg.reference is None else cfg.reference
    check_choice("reference", reference, sharders)
    return Setting(
        out=folder_to_write("out", cfg.out),
        reference=reference,
        margin=float(cfg.tie),
        num_workers=cfg.workers or num_cores(),
        limit_s=float(cfg.limit_s),
        file_format=cfg.format,
    )


def _tasks(cfg: DictConfig) -> list[ComparedTask]:
    """Return the tasks of the config, from files or from a set.

    Raises:
        ConfigError: there is no task, or a file does not describe one.
    """
    if (cfg.tasks is None) == (cfg.task_set is None):
        raise ConfigError(
            "give either tasks=, a folder or a pattern of files, or task_set=, one of "
            f"{', '.join(TASK_SETS)}, and not both"
        )
    if cfg.task_set is not None:
        check_choice("task_set", cfg.task_set, TASK_SETS)
        found = TASK_SETS[cfg.task_set](cfg.seed, **({} if cfg.num is None else {"num": cfg.num}))
        return [
            ComparedTask(f"task_{i:03d}", one.task, one.kind, cfg.hardware)
            for i, one in enumerate(found)
        ]
    files = task_files(str(cfg.tasks)).items()
    return [ComparedTask(name, read_task(path), "", cfg.hardware) for name, path in files]


def task_files(pattern: str) -> dict[str, Path]:
    """Return the files in a folder, or of a pattern, by task name.

    The names include folders if the names of the files alone are not unique.

    Raises:
        ConfigError: there are no files, or two tasks have the same name even with folders.
    """
    wanted = os.path.join(glob.escape(pattern), "task*.json") if Path(pattern).is_dir() else pattern  # noqa: PTH118
    paths = [Path(path).absolute() for path in sorted(glob.glob(wanted, recursive=True))]  # noqa: PTH207
    if not paths:
        raise ConfigError(
            f"tasks is {pattern!r}, where there is no task; set it to a folder with task*.json "
            "or a pattern of files"
        )
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        top = os.path.commonpath([path.parent for path in paths])
        names = ["-".join(path.relative_to(top).with_suffix("").parts) for path in paths]
    checked_names("tasks", names, example="one of them with another name")
    return dict(zip(names, paths, strict=True))


def _cases(cfg: DictConfig, sharders: Sequence[str], tasks: Sequence[ComparedTask]) -> list[Case]:
    """Return a case for each task and sharder; planners of a task share a cost model."""
    if cfg.get("cost_model") is None:
        raise ConfigError(
            "cost_model is none, and a comparison predicts costs; set cost_model=learned"
        )
    factories = [
        dataclasses.replace(planner_factory(config_of_sharder(name)), value_profiles=None)
        for name in sharders
    ]
    planners: dict[str, list[Planner]] = {}
    cases = []
    for one in tasks:
        context = run_context(one.hardware, one.task, one.task.known_optimizer)
        if repr(context) not in planners:
            planners[repr(context)] = planners_for(context, factories)
        found = planners[repr(context)]
        costs_digest = digest_of_costs(found[0].cost_model, plain(cfg.cost_model))
        cases += [
            Case(one.name, name, one.task, planner, one.kind, costs_digest, one.topology)
            for name, planner in zip(sharders, found, strict=True)
        ]
    return cases


def unused(cfg: DictConfig) -> dict[str, str]:
    """Declare which keys have no effect on a comparison, and why."""
    reasons = unused_of_costs(cfg)
    if not cfg.measured:
        reasons |= dict.fromkeys(("rounds", "iterations"), "measured=true measures plans")
    if cfg.task_set is None:
        reasons["num"] = "it is of a task_set, not of tasks="
    if cfg.topologies is None:
        reasons["ranks"] = "topologies= has the hosts of the ranks; name some of them"
    else:
        reasons["hardware"] = "topologies name their GPUs"
    return reasons


def main() -> None:
    sys.argv[1:] = map(quoted_list, sys.argv[1:])
    run_command(compare, "compare", unused=unused)


if __name__ == "__main__":
    main()
