"""Says which rank this is, whether its job was restarted, and when the job began.

It reads the environment that torchrun and Slurm set, and does not load torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import datetime
from pathlib import Path

from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.ranks.process import start_ticks

RESTARTS_VARIABLE = "DLRM_SHARDED_RESTARTS"
"""Number of restarts of the ranks, as our launcher counts them on every host. torchrun counts only
restarts after failures on the same host."""

STARTED_FOLDER = Path("runs/.started")


def rank_number() -> int:
    """Return the number of this rank, as torchrun sets it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def is_restart() -> bool:
    """Return whether torchrun or Slurm has restarted this job after a failure or preemption."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", RESTARTS_VARIABLE)
    return any(int(os.environ.get(count, "0")) > 0 for count in counts)


def job_id() -> str | None:
    """Return an identifier of the job in all its attempts; None if nothing can restart it."""
    job = os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID")
    if job == "none":  # torchrun's default; its process is the same in every attempt
        return f"torchrun {os.getppid()} {start_ticks(os.getppid())}"
    return job


def started(time_format: str) -> str:
    """Return the time at which the job's first attempt began; later attempts read it from a file.

    Args:
        time_format: a format of `datetime.strftime`.
    """
    now = datetime.now()
    job = job_id()
    if job is None:
        return now.strftime(time_format)
    # An identifier may contain anything, so it does not become part of a path.
    path = STARTED_FOLDER / hashlib.sha256(job.encode()).hexdigest()[:32]
    if is_restart():
        with contextlib.suppress(OSError, ValueError):
            return datetime.fromisoformat(path.read_text()).strftime(time_format)
    with contextlib.suppress(OSError):  # the run's own folder will raise the same, with a message
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, now.isoformat().encode())
    return now.strftime(time_format)
