"""The NVIDIA GPUs that processes on this machine see, and the driver.

The Makefile runs this file as a script to choose an environment before any is installed, so it
needs nothing but Python. The script prints one name for each GPU.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

DEVICE_VARIABLE = "DLRM_SHARDED_DEVICE"
"""Environment variable whose value, cuda or cpu, demands a device."""

DEVICE_FILES = Path("/dev")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
NVIDIA_SMI_TIMEOUT_S = 60


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names in CUDA_VISIBLE_DEVICES of the GPUs that a process would see.

    As in CUDA, names after the first unknown one do not count.

    Args:
        environment: environment of the process. `DLRM_SHARDED_DEVICE=cpu` hides all GPUs.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed in ("", "-1") or environment.get(DEVICE_VARIABLE) == "cpu":
        return []
    uuids = _gpus_of_machine()
    if listed is None:
        return [str(index) for index in range(len(uuids))]

    def is_known(name: str) -> bool:
        if name.isdecimal():
            return int(name) < len(uuids)
        is_gpu = name.startswith("GPU-") and any(uuid.startswith(name) for uuid in uuids)
        return is_gpu or name.startswith("MIG-")  # a part of a divided GPU

    return list(itertools.takewhile(is_known, map(str.strip, listed.split(","))))


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver, or None if it cannot be read."""
    if DRIVER_FILE.exists():
        text = DRIVER_FILE.read_text()
    else:  # as in Windows' subsystem for Linux
        text = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    version = re.search(r"(?<!\S)\d{3,}(\.\d+)+", text)
    return None if version is None else version[0]


def _gpus_of_machine() -> list[str]:
    """Return the UUIDs of all GPUs, in the order of their numbers.

    If nvidia-smi is missing or fails, as it does while an update of the driver waits for a reboot,
    the files that CUDA would open are counted. A scheduler may deny a job to open them.
    """
    lines = [line for line in nvidia_smi("-L").splitlines() if line.startswith("GPU")]
    uuids = [re.search(r"UUID: ([^)\s]+)", line) for line in lines]
    return [uuid[1] if uuid else "" for uuid in uuids] or [
        "" for file in DEVICE_FILES.glob("nvidia[0-9]*") if _can_open(file)
    ]


def _can_open(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDWR))
    except OSError:
        return False
    return True


def nvidia_smi(*options: str) -> str:
    """Return what nvidia-smi prints, or nothing if it is missing, fails or hangs."""
    command = ["nvidia-smi", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


if __name__ == "__main__":
    print(*visible_gpus(), sep="\n")
