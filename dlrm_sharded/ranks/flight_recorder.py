"""torch's flight recorder, which knows the collectives of NCCL and writes them when one hangs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

FOLDER = Path("runs/.flight_recorder")

FILE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
"""The path of a dump without the number of its rank."""

SETTINGS = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""They are torch's defaults, which differ between its versions."""


def name_dumps(job: str) -> None:
    """Let the ranks of a job write their dumps to one folder, unless the user has named another.

    Args:
        job: what identifies the job on all its hosts.
    """
    name = hashlib.sha256(job.encode()).hexdigest()[:12]
    os.environ.setdefault(FILE_VARIABLE, str(FOLDER.absolute() / f"{name}_rank_"))


def arm(job: str) -> None:
    """Let NCCL's watchdog write a dump when a collective hangs; before the group is made."""
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    name_dumps(job)
    try:
        Path(os.environ[FILE_VARIABLE]).parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # torch then writes to the user's cache
        del os.environ[FILE_VARIABLE]


def reading_text() -> str:
    """Return what to read after a hang, and with which command; empty if nothing is known."""
    if not (prefix := os.environ.get(FILE_VARIABLE)):
        return ""
    path = Path(prefix)
    return (
        f"torch's flight recorder writes {prefix}RANK on each host; with the files of all ranks in "
        f"one folder, read them by: torchfrtrace -p {path.name} {path.parent}"
    )


def pending_collective() -> str | None:
    """Return words for the oldest collective that NCCL has not completed; None if there is none."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # torch without NCCL
        return None
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        for entry in json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", ()):
            if entry["state"] != "completed":
                name = entry["profiling_name"].removeprefix("nccl:")
                return f"NCCL's {name}, number {entry['collective_seq_id']} of its group"
    return None
