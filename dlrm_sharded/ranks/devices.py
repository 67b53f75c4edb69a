"""Chooses whether ranks compute on GPUs or on the CPU, and says why GPUs cannot be used."""

from __future__ import annotations

import os
import re

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.versions import readable_versions
from dlrm_sharded.ranks.gpus import DEVICE_VARIABLE, driver_version, visible_gpus
from dlrm_sharded.ranks.version_sets import install_command

OLD_FBGEMM, OLD_COLUMN_LIMIT = (1, 7), 2**10
"""Version before which lookups on GPUs support fewer columns, and how many."""


def device_type() -> str:
    """Return the type of the device that ranks on this machine compute on: cuda or cpu.

    It is cuda wherever GPUs are visible, and `DLRM_SHARDED_DEVICE` demands either of the two. GPUs
    that torch cannot use are an error: on the CPU, the job would take many times as long.

    Raises:
        ConfigError: torch cannot use the GPUs that are visible or demanded.
    """
    demanded = os.environ.get(DEVICE_VARIABLE, "")
    if demanded not in ("", "cpu", "cuda"):
        raise ConfigError(f"{DEVICE_VARIABLE} is {demanded!r}, must be cpu or cuda")
    if demanded == "cpu":
        return "cpu"
    import torch  # takes seconds to load

    if torch.cuda.is_available():
        return "cuda"
    num_gpus = len(visible_gpus())
    if num_gpus == 0 and demanded != "cuda":
        return "cpu"
    raise ConfigError(f"{_obstacle(num_gpus)}, or set {DEVICE_VARIABLE}=cpu to compute on the CPU")


def column_limit(device: str) -> int | None:
    """Return the `Topology.column_limit` of the installed lookups on a device; None for no limit.

    CUDA builds of FBGEMM before 1.7 look up shards of more than 1,024 columns wrongly: of batches
    with at most 8 ids a sample, they leave out the vectors of up to half of the samples (its pull
    request 5569).
    """
    version = readable_versions(["fbgemm-gpu"]).get("fbgemm-gpu", "")
    number = re.match(r"(\d+)\.(\d+)", version)  # that of an environment for CPUs is 0+cpu
    is_old = number is not None and tuple(map(int, number.groups())) < OLD_FBGEMM
    return OLD_COLUMN_LIMIT if device == "cuda" and is_old else None


def _obstacle(num_gpus: int) -> str:
    """Say why torch cannot use the visible GPUs, and what to change."""
    import torch

    if num_gpus == 0:
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (
            f"{DEVICE_VARIABLE} is cuda, but no GPU is visible here (CUDA_VISIBLE_DEVICES is "
            f"{listed!r}); show GPUs to this process"
        )
    reason = "it is built for the CPU"
    cure = f"run: pip uninstall -y torch fbgemm-gpu-cpu && {install_command('cuda')}"
    if (cuda := torch.version.cuda) is not None:
        cure = "install a newer driver, or torch, torchrec and fbgemm-gpu for an older CUDA"
        try:
            torch.cuda.init()
        except RuntimeError as error:
            reason = f"it is built for CUDA {cuda}: {str(error).partition('. ')[0]}"
    return (
        f"torch {torch.__version__} cannot use the visible GPUs ({num_gpus}; driver "
        f"{driver_version() or 'unknown'}), as {reason}; {cure}"
    )
