"""The program of every rank of a sweep's job: `python -m dlrm_torchx.worker FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext
from omegaconf import open_dict, read_write

from dlrm_sharded.commands.own_folder import OwnRunFolder, take_folder
from dlrm_sharded.ranks.process import die_with_parent
from dlrm_torchx.mailbox import ORDER, HydraCall, JobMailbox


def main(folder: Path) -> None:
    """Make the job's call as Hydra would, or those of a sweep in rounds.

    Only rank 0 logs, writes files and sends the result.
    """
    die_with_parent()
    rank = int(os.environ["RANK"])
    # torchrun takes a new port whenever it starts all ranks, so the port identifies the attempt.
    mailbox = JobMailbox(folder, attempt=os.environ["MASTER_PORT"])
    mailbox.remove_earlier_attempts()
    try:
        if (folder / ORDER).exists():
            from dlrm_torchx.round_ranks import run_rounds  # loads torch

            run_rounds(folder, rank)
            job_return = JobReturn()
        else:
            job_return = run_call(mailbox.receive_call(), rank)
    except SystemExit as ended:
        if ended.code:
            reason = ended.code if isinstance(ended.code, str) else f"exit code {ended.code}"
            mailbox.send_failure(rank, getattr(ended, "reason", reason))
        raise
    except Exception as error:
        mailbox.send_failure(rank, f"{type(error).__name__}: {error}")
        raise
    if rank == 0:
        mailbox.send_return(job_return)


def run_call(call: HydraCall, rank: int) -> JobReturn:
    """Make a call as Hydra would, and raise the error that it ends with."""
    Singleton.set_state(call.singletons)
    context = call.hydra_context
    if rank > 0:
        context = HydraContext(config_loader=context.config_loader, callbacks=Callbacks())
        with read_write(call.config), open_dict(call.config):
            call.config.hydra.output_subdir = None
    elif any(isinstance(callback, OwnRunFolder) for callback in context.callbacks.callbacks):
        sweep = call.config.hydra.sweep  # Hydra calls on_run_start for single runs only
        take_folder(call.config, Path(sweep.dir) / sweep.subdir)
    job_return = run_job(
        hydra_context=context,
        task_function=call.function,
        config=call.config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        configure_logging=rank == 0,
    )
    if job_return.status is JobStatus.FAILED:
        raise job_return._return_value
    return job_return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
