"""Predicts how long a training waits while its model is copied for a checkpoint."""

from __future__ import annotations

from dlrm_sharded.hardware.gpus.gpu_specs import find_gpu_spec
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.job.memory_check import CheckedMemory
from dlrm_sharded.plans.task import Topology

HOST_GB_PER_S = 300.0
"""Bandwidth that the memory of one host is taken to give to all its GPUs: about two thirds of the
nominal one of two sockets (DGX A100 410 GB/s, DGX H100 614)."""

PAGE_LOCKING_GB_PER_S = 2.0
"""Rate at which a process page-locks memory: an assumption."""


def copy_s(memory: CheckedMemory, hardware: Hardware | None, topology: Topology) -> float | None:
    """Return the time of the largest copy of a rank, once its memory is there.

    A CPU copies as fast as its probe did. A GPU sends at the nominal speed of its link, which no
    measurement has confirmed, and all GPUs of a host share what its memory can take.

    Returns:
        Seconds; None if nothing is copied, or the hardware is not known.
    """
    if not memory.has_checkpoint_copy or hardware is None:
        return None
    copy_bytes = max(rank.checkpoint_copy for rank in memory.host or memory.ranks)
    if not memory.host:
        probe = hardware.probe
        # The probe counts what is read and what is written.
        return None if probe is None else 2 * copy_bytes / (1e9 * probe.copy_gb_per_s)
    spec = find_gpu_spec(hardware.name)
    if spec is None:
        return None
    gb_per_s = min(spec.host_gb_per_s, HOST_GB_PER_S / topology.ranks_per_host)
    return copy_bytes / (1e9 * gb_per_s)


def page_locking_s(memory: CheckedMemory) -> float:
    """Return how long the first copy waits, besides, for its page-locked memory, in s."""
    copy_bytes = max((rank.checkpoint_copy for rank in memory.host), default=0)
    return copy_bytes / (1e9 * PAGE_LOCKING_GB_PER_S)
