"""Hardware, versions and commit, without which a measurement says little."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_sharded.files.versions import readable_versions

if TYPE_CHECKING:
    import torch

PACKAGES = ("dlrm_sharded", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the CPU model."""
    if device.type == "cuda":
        import torch  # takes seconds to load, and only names of GPUs need it

        return torch.cuda.get_device_name(device)
    return cpu_name()


def cpu_name() -> str:
    """Return the name of the CPU model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"cpu: {line.split(':', 1)[1].strip()}"
    return f"cpu: {platform.processor() or platform.machine()}"


def versions() -> dict[str, str]:
    """Return the installed versions of Python and of the packages that measurements depend on."""
    return {"python": platform.python_version(), **readable_versions(PACKAGES)}


def fbgemm_version(found: Mapping[str, str]) -> str | None:
    """Return the version of FBGEMM in `found`, the result of `versions`; None if there is none.

    In an environment for CPUs, fbgemm-gpu is an empty package that stands for fbgemm-gpu-cpu.
    """
    gpu, cpu = found.get("fbgemm-gpu"), found.get("fbgemm-gpu-cpu")
    return cpu if gpu is None or (cpu is not None and gpu.endswith("+cpu")) else gpu


def commit() -> str | None:
    """Return the checkout's commit, or None outside a checkout.

    An installed package may be inside another repository, such as one with a virtual environment.
    """
    package = Path(__file__).resolve().parents[1]
    command = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    toplevel, head = done.stdout.splitlines()
    return head if Path(toplevel) == package.parent else None
