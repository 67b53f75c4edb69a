"""The program of every rank of a sweep's job: `python -m dlrm_torchx.worker FOLDER`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from hydra.core.utils import JobReturn

from dlrm_sharded.commands.hydra_app import quiet_libraries
from dlrm_sharded.ranks.process import die_with_parent
from dlrm_torchx.mailbox import ORDER, JobMailbox


def main(folder: Path) -> None:
    """Make the job's call as Hydra would, or all calls of a sweep in rounds.

    Only rank 0 logs, writes files and sends the result.
    """
    die_with_parent()
    quiet_libraries()
    rank = int(os.environ["RANK"])
    logging.disable(logging.WARNING if rank > 0 else logging.NOTSET)
    # torchrun uses a new port whenever it starts all ranks, so the port identifies the attempt.
    mailbox = JobMailbox(folder, attempt=os.environ["MASTER_PORT"])
    mailbox.remove_earlier_attempts()
    try:
        if (folder / ORDER).exists():
            from dlrm_torchx.round_ranks import run_rounds  # loads torch

            run_rounds(folder, rank)
            job_return = JobReturn()
        else:
            job_return = mailbox.receive_call().run(rank)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
