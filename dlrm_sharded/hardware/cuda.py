"""Reads the fingerprint of a GPU from torch and nvidia-smi."""

from __future__ import annotations

import re
from typing import Any

import torch

from dlrm_sharded.hardware.fingerprint import GpuFingerprint
from dlrm_sharded.ranks.gpus import driver_version, nvidia_smi

PCIE_QUERY = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"


def read_gpu(device: torch.device) -> GpuFingerprint:
    """Return the fingerprint of a GPU that torch can use."""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    return GpuFingerprint(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_gib=round(properties.total_memory / 2**30),
        memory_gb_per_s=_memory_gb_per_s(properties),
        nvlinks=count_nvlinks(nvidia_smi("nvlink", "--status", "-i", uuid)),
        pcie=pcie_link(nvidia_smi(PCIE_QUERY, "--format=csv,noheader,nounits", "-i", uuid)),
        num_gpus=torch.cuda.device_count(),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        driver=driver_version(),
    )


def count_nvlinks(status: str) -> int | None:
    """Return the number of active links in the output of `nvidia-smi nvlink --status`, or None."""
    return len(re.findall(r"Link \d+: [\d.]+ GB/s", status)) or None


def pcie_link(line: str) -> str | None:
    """Return "5x16" for the line "5, 16" of nvidia-smi; None if it does not know."""
    found = re.fullmatch(r"\s*(\d+),\s*(\d+)\s*", line)
    return None if found is None else f"{found[1]}x{found[2]}"


def _memory_gb_per_s(properties: Any) -> int | None:
    """Return the peak bandwidth: the memory moves data on both edges of its clock (kHz)."""
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    width_bits = getattr(properties, "memory_bus_width", 0)
    return round(2 * clock_khz * 1e3 * width_bits / 8 / 1e9) or None
