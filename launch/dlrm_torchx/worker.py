"""What every rank of a sweep's job runs: `python -m dlrm_torchx.worker FOLDER`, under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.singleton import Singleton
from hydra.core.utils import JobStatus, run_job
from hydra.types import HydraContext
from omegaconf import open_dict, read_write

from dlrm_sharded.process import die_with_parent
from dlrm_torchx.exchange import Exchange


def main(folder: Path) -> None:
    """Run the task as Hydra runs a job; rank 0 alone logs, writes and returns what it returned."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    # torchrun takes a new port whenever it starts all ranks, on whatever node and after whatever.
    exchange = Exchange(folder, attempt=os.environ["MASTER_PORT"])
    exchange.forget_earlier()
    try:
        _run(exchange, rank)
    except SystemExit as ended:
        if ended.code:
            words = ended.code if isinstance(ended.code, str) else f"exit code {ended.code}"
            exchange.send_failure(rank, getattr(ended, "reason", words))
        raise
    except Exception as error:
        exchange.send_failure(rank, f"{type(error).__name__}: {error}")
        raise


def _run(exchange: Exchange, rank: int) -> None:
    task = exchange.receive_task()
    Singleton.set_state(task.singletons)
    context = task.hydra_context
    if rank > 0:
        context = HydraContext(config_loader=context.config_loader, callbacks=Callbacks())
        with read_write(task.config), open_dict(task.config):
            task.config.hydra.output_subdir = None
    job_return = run_job(
        hydra_context=context,
        task_function=task.function,
        config=task.config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        configure_logging=rank == 0,
    )
    if job_return.status is JobStatus.FAILED:
        raise job_return._return_value
    if rank == 0:
        exchange.send_return(job_return)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
