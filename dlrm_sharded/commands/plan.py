"""Plan a task, without training and without a GPU: the command `dlrm-plan`.

dlrm-plan task=task.json sharder=torchrec out=plan.json
dlrm-plan data=criteo_kaggle topology.world_size=8 topology.memory_gib=60 out=plan.json
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import CONF_DIR, run_hydra
from dlrm_sharded.commands.planner import build_planner
from dlrm_sharded.commands.task_file import task_of_file
from dlrm_sharded.cost.base import is_additive
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.explain.text import plan_lines, sections
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import check_file_to_write, is_written_through, write_json
from dlrm_sharded.files.provenance import fbgemm_version, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import named_gpu_spec
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.process import threads_of_a_rank

HERE = "here"

log = logging.getLogger("dlrm_sharded.plans.plan")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="plan")
def hydra_main(cfg: DictConfig) -> None:
    with exit_codes():
        if not cfg.out:
            raise ConfigError("out is not set; name the plan.json to write")
        check_file_to_write("out", cfg.out)
        task = _task(cfg)
        planner = build_planner(
            cfg,
            _context(cfg, task),
            diagnose=functools.partial(diagnose, alternatives=True) if cfg.explain else None,
        )
        if cfg.explain and not is_additive(planner.cost_model):
            raise ConfigError("explain=true needs an additive cost model: cost_model=learned")
        plan, report = planner.plan(task)
        write_json(cfg.out, plan_json(plan, report))
        if cfg.task is None and (task_out := _task_out(cfg)) is not None:
            write_json(task_out, task.to_json())
        elif cfg.task is None:
            log.info("the task is not written, as it has no place beside %s; set task_out", cfg.out)
        for line in [*plan_lines(plan, report, task), f"wrote {cfg.out}"]:
            log.info("%s", line)
        if report.standing is not None:
            log.info("prices: %s", report.standing.text)
        if report.diagnosis is not None:
            for section in sections(report.diagnosis):
                log.info("%s", "\n  ".join([section.title, *section.lines]))
        if report.caveat is not None:
            log.warning("caveat: %s%s", report.caveat, _other_compute_device(task))


def _context(cfg: DictConfig, task: ShardingTask) -> RunContext:
    """Return what the ranks of the task compute on: any device, a GPU with a name, or this one."""
    hardware, device = cfg.hardware, task.topology.compute_device
    if hardware is None:
        return RunContext(device=device)
    if hardware == HERE:
        return _context_here(task.topology, task.optimizer or cfg.optimizer.embedding)
    spec = named_gpu_spec(hardware, key="hardware")
    if device != "cuda":
        raise ConfigError(
            f"hardware is {hardware!r}, a GPU, and the task is for CPUs; set hardware to null, or "
            "topology.compute_device to cuda in task.json"
        )
    spec.check_memory(max(task.topology.rank_memory_bytes) / GIB)
    return RunContext(device=device, hardware=Hardware(spec.device_name))


def _context_here(topology: Topology, optimizer: str) -> RunContext:
    """Return ranks that compute on this machine, with as many threads as those of a run."""
    device = topology.compute_device
    if device == "cuda" and device_type() != "cuda":
        raise ConfigError(
            "hardware is here, the task is for GPUs, and this machine has none; name their kind, "
            "or set topology.compute_device to cpu in task.json"
        )
    import torch  # task.json is planned without it, where hardware is not here

    from dlrm_sharded.hardware.detect import local_hardware

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of_a_rank(topology.ranks_per_host))
    hardware = local_hardware(torch.device(device))
    return RunContext(
        device, hardware, optimizer, topology.ranks_per_host, fbgemm_version(versions())
    )


def _task(cfg: DictConfig) -> ShardingTask:
    """Return the task that the config names, or the one of its data."""
    if (cfg.task is None) == (cfg.get("data") is None):
        raise ConfigError(
            "name either task=task.json or data=, one of conf/data, and not both, to plan from"
        )
    if cfg.task is not None:
        of_file = task_of_file(cfg)
        if of_file.note is not None:
            log.info("%s", of_file.note)
        return of_file.task
    if (task_out := _task_out(cfg)) is not None:
        check_file_to_write("task_out", task_out)
        if os.path.realpath(task_out) == os.path.realpath(cfg.out):
            raise ConfigError(f"the plan and its task would both be {cfg.out!r}; set task_out")
    from dlrm_sharded.commands.task_from_data import task_from_data  # loads torch

    return task_from_data(cfg)


def _task_out(cfg: DictConfig) -> str | None:
    """Return where a task from data is written; None if `out` is a stream, beside which is none."""
    if cfg.task_out:
        return str(cfg.task_out)
    if is_written_through(cfg.out):
        return None
    return str(Path(cfg.out).with_name("task.json"))


def _other_compute_device(task: ShardingTask) -> str:
    """Write what to do if the task is for CPUs, which a task.json has to say."""
    if task.topology.compute_device == "cpu":
        return ""
    return "; if the ranks are CPUs, set topology.compute_device to cpu in task.json"


def main() -> None:
    run_hydra(hydra_main)


if __name__ == "__main__":
    main()
