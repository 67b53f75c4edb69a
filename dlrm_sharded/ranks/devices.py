"""Chooses whether ranks compute on GPUs or on the CPU, and says why GPUs cannot be used."""

from __future__ import annotations

import os

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.gpus import DEVICE_VARIABLE, driver_version, visible_gpus
from dlrm_sharded.ranks.version_sets import FBGEMM, install_command, installed_versions


def device_type() -> str:
    """Return the type of device on which ranks on this machine compute: cuda or cpu.

    It is cuda wherever GPUs are visible, unless `DLRM_SHARDED_DEVICE` demands one of the two. GPUs
    that torch cannot use are an error: on the CPU, the job would take many times as long.

    Raises:
        ConfigError: torch cannot use the GPUs that are visible or demanded.
    """
    demanded = os.environ.get(DEVICE_VARIABLE, "")
    if demanded not in ("", "cpu", "cuda"):
        raise ConfigError(f"{DEVICE_VARIABLE} is {demanded!r}; it must be cpu or cuda")
    if demanded == "cpu":
        return "cpu"
    import torch  # takes seconds to load

    if torch.cuda.is_available():
        return "cuda"
    num_gpus = len(visible_gpus())
    if num_gpus == 0 and demanded != "cuda":
        return "cpu"
    raise ConfigError(_refusal(num_gpus))


def column_limit(device: str) -> int | None:
    """Return the `Topology.column_limit` of the installed lookups on a device; None for no limit.

    The CUDA build of FBGEMM 1.6 looks up shards of more than 1,024 columns incorrectly: in batches
    with at most 8 ids per sample, it leaves out the vectors of up to half of the samples (its pull
    request 5569).
    """
    is_old = installed_versions().get(FBGEMM["cuda"], "").startswith("1.6.")
    return 2**10 if device == "cuda" and is_old else None


def _refusal(num_gpus: int) -> str:
    """Return a message that says why torch cannot use GPUs, and what to change."""
    import torch

    cure = "install a newer driver, or torch, torchrec and fbgemm-gpu for an older CUDA"
    if torch.version.cuda is None:
        cure = f"run: pip uninstall -y torch && {install_command(installed_versions(), 'cuda')}"
    elif num_gpus == 0:
        cure = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
    reason = "it finds none"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError in a CPU build
        reason = str(error).partition(". ")[0]
    return (
        f"torch {torch.__version__} cannot use the visible GPUs ({num_gpus}; driver "
        f"{driver_version() or 'unknown'}): {reason}; {cure}, or set {DEVICE_VARIABLE}=cpu to "
        "compute on the CPU"
    )
