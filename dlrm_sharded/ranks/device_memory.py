"""The memory of a rank's device or host: used and available."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.process import release_freed_memory, resident_bytes

MEMORY_TOLERANCE = 0.01
"""Relative difference below which free memory of two ranks counts as equal."""


def with_memory_of_all_ranks(
    topology: Topology, *, group: dist.ProcessGroup | None = None
) -> Topology:
    """Return the topology with the memory that every rank found; all ranks call this together.

    Ranks with nearly equal memory (`MEMORY_TOLERANCE`) all get the smallest value, so that equal
    ranks stay equal and successive runs on one machine have the same task.
    """
    found = [0] * dist.get_world_size(group)
    dist.all_gather_object(found, topology.memory_bytes, group=group)
    smallest = min(found)
    is_equal = smallest >= (1 - MEMORY_TOLERANCE) * max(found)
    return dataclasses.replace(
        topology, memory_bytes=smallest, memory_bytes_by_rank=None if is_equal else tuple(found)
    )


def free_bytes(device: torch.device, local_world_size: int) -> int:
    """Return the free memory of a rank's GPU, or on a CPU its share of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes() // local_world_size


def used_and_available_bytes(device: torch.device) -> tuple[int, int]:
    """Return the memory that this rank's process uses, and the memory available on its host.

    On CUDA, both are the device's memory, of which the context counts as used.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, free
    release_freed_memory()
    return resident_bytes(), available_host_bytes()


def available_host_bytes() -> int:
    """Return the memory available on this host without swapping, within the container's limits."""
    found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    available = int(found[1]) * 1024 if found else 2**62
    groups = Path("/proc/self/cgroup").read_text()
    return min([available, *free_in_groups(groups, Path("/sys/fs/cgroup"))])


def free_in_groups(text: str, root: Path) -> list[int]:
    """Return the memory left in each control group of a process that has a limit.

    The limits of all parent groups count, too. In a container, the path of the process's group may
    not exist, and the container's group is the root.

    Args:
        text: /proc/PID/cgroup, in which version 2 of control groups has the line "0::/path".
        root: mount point of the control groups.
    """
    own = root / text.rpartition("0::/")[2].strip()
    free = []
    for group in (own, *own.parents):
        with contextlib.suppress(FileNotFoundError, ValueError):  # the limit can be "max"
            limit_bytes = int((group / "memory.max").read_text())
            used_bytes = int((group / "memory.current").read_text())
            # Inactive page cache counts as used, but the kernel frees it on demand.
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free.append(limit_bytes - used_bytes + int(stat["inactive_file"]))
    return free
