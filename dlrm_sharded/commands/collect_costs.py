"""Measure what random plans cost on this machine: the command `dlrm-collect-costs`.

dlrm-collect-costs out=calibration/costs.parquet collect.time_budget_s=300
dlrm-collect-costs collect.task=task.json

A collection that was killed continues when it is started again. Under torchrun or TorchX it uses
their ranks; otherwise it starts its own.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dlrm_sharded.calibration.collect import CollectConfig, collect
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import instantiate, run_hydra
from dlrm_sharded.commands.task_plans import plans_to_measure
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.files.json_files import check_file_to_write
from dlrm_sharded.plans.task import ShardingTask, read_task
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_sharded.ranks.process import threads_of_a_rank
from dlrm_sharded.ranks.torchrun import launch

MODULE = "dlrm_sharded.commands.collect_costs"
CPU_RANKS = 4
"""Ranks on a machine without GPUs."""

RUN_RANKS = 2
"""Ranks of a run on a CPU, unless told otherwise; a rank here has as many threads as one there."""


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="collect")
def hydra_main(cfg: DictConfig) -> None:
    if "RANK" not in os.environ:
        with exit_codes():
            check_file_to_write("out", cfg.out, may_be_stream=False)
            # what is wrong is reported once, before ranks start
            _task_of(instantiate(cfg.collect))
            if cfg.num_ranks is not None:
                check_count("num_ranks", cfg.num_ranks, least=1)
            num_ranks = cfg.num_ranks or default_num_ranks()
        sys.exit(_start_ranks(num_ranks))
    with exit_codes(), process_group(timeout_s=1800) as rank:
        with all_or_none():
            check_file_to_write("out", cfg.out, may_be_stream=False)
            config = instantiate(cfg.collect)
            task = _task_of(config)
        plans_of_task = None if task is None else functools.partial(plans_to_measure, task)
        collect(config, Path(cfg.out), rank, plans_of_task)


def main() -> None:
    run_hydra(hydra_main)


def default_num_ranks() -> int:
    """Return one rank for every visible GPU, or `CPU_RANKS` if there are none."""
    return max(len(visible_gpus()), 1) if device_type() == "cuda" else CPU_RANKS


def _task_of(config: CollectConfig) -> ShardingTask | None:
    """Return the task that a collection is spent on; None for random plans alone.

    Raises:
        ConfigError: the file is no task, or one of another optimizer.
    """
    if config.task is None:
        return None
    task = read_task(config.task)
    if task.optimizer not in (None, config.optimizer):
        raise ConfigError(
            f"{config.task} is a task of {task.optimizer}, and collect.optimizer is "
            f"{config.optimizer}; give collect.optimizer={task.optimizer}"
        )
    return task


def _start_ranks(num_ranks: int) -> int:
    """Run this module on ranks that torchrun starts from this process; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(RUN_RANKS)))
    return launch(["--nproc-per-node", str(num_ranks), "-m", MODULE, *sys.argv[1:]])


if __name__ == "__main__":
    main()
