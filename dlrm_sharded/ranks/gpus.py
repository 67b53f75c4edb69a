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
    num_gpus = _num_gpus()
    if environment.get(DEVICE_VARIABLE) == "cpu" or num_gpus == 0:
        return []
    numbers = [str(number) for number in range(num_gpus)]
    listed = environment.get("CUDA_VISIBLE_DEVICES", ",".join(numbers)).split(",")

    def is_known(name: str) -> bool:  # a MIG is a part of a divided GPU
        return name in numbers or name.startswith(("GPU-", "MIG-"))

    return list(itertools.takewhile(is_known, map(str.strip, listed)))


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver, or None if it cannot be read."""
    query = ("--query-gpu=driver_version", "--format=csv,noheader")  # in Windows' Linux
    text = DRIVER_FILE.read_text() if DRIVER_FILE.exists() else nvidia_smi(*query)
    version = re.search(r"(?<!\S)\d{3,}(\.\d+)+", text)
    return None if version is None else version[0]


def _num_gpus() -> int:
    """Return the number of GPUs of this machine.

    If nvidia-smi is missing or fails, as it does while an update of the driver waits for a reboot,
    the files that CUDA would open are counted. A scheduler may deny a job to open them.
    """
    if listed := re.findall(r"^GPU \d", nvidia_smi("-L"), re.MULTILINE):
        return len(listed)
    return sum(os.access(file, os.W_OK) for file in DEVICE_FILES.glob("nvidia[0-9]*"))


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
