"""Watches the load of the machines on which ranks compute, because load distorts measurements."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_sharded.ranks.gpus import GpuState, GpuStates, gpu_state

BUSY_CYCLES = 10**9
"""GPU cycles of about half a second, within which nvidia-smi answers."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The load of all hosts, and the states of all GPUs, while the ranks computed.

    Args:
        hosts: load average of each host at the beginning, by host name.
        began_s: the beginning, in seconds since 1970.
        core_wait: largest share of time in which a rank was ready to run, but others had the
            cores; 0 where the kernel does not report it.
        gpus: states of each rank's GPU, in rank order; empty on CPUs, and if nvidia-smi does not
            report one of them.
    """

    hosts: Mapping[str, float]
    began_s: float
    core_wait: float
    gpus: tuple[GpuStates, ...] = ()

    @property
    def slowed_gpu(self) -> str | None:
        """A text that says which GPU was throttled or changed its clocks; None if none did."""
        for rank, gpu in enumerate(self.gpus):
            if gpu.is_disturbed:
                return (
                    f"the GPU of rank {rank} had {gpu.before.sm_mhz} MHz before and "
                    f"{gpu.after.sm_mhz} MHz after (reasons {gpu.before.reasons:#x} and "
                    f"{gpu.after.reasons:#x}; nvidia-smi -q -d PERFORMANCE explains them)"
                )
        return None


class LoadWatch:
    """Watches the load under which this rank computes, from construction on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, _state_of(device)
        self._load = round(os.getloadavg()[0], 2)
        self._began_s = time.time()
        self._started_s, self._waited_s = time.perf_counter(), core_wait_s()

    def conclude(self) -> MachineLoad:
        """Return the load of all ranks' machines; a collective of all ranks."""
        share = (core_wait_s() - self._waited_s) / (time.perf_counter() - self._started_s)
        gpu = _state_of(self._device)
        states = GpuStates(self._gpu, gpu) if self._gpu and gpu else None
        found: list[tuple[str, float, float, GpuStates | None]] = [("", 0.0, 0.0, None)]
        found *= dist.get_world_size()
        dist.all_gather_object(found, (socket.gethostname(), self._load, share, states))
        of_rank = [states for *_, states in found if states is not None]
        return MachineLoad(
            hosts={host: load for host, load, _, _ in found},
            began_s=self._began_s,
            core_wait=max(share for _, _, share, _ in found),
            gpus=tuple(of_rank) if len(of_rank) == len(found) else (),
        )


def _state_of(device: torch.device) -> GpuState | None:
    """Return the state of a GPU while it is busy, because the clocks of an idle one say nothing."""
    if device.type != "cuda":
        return None
    torch.cuda._sleep(BUSY_CYCLES)
    state = gpu_state(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    torch.cuda.synchronize(device)  # otherwise, later work would be launched ahead of the GPU
    return state


def core_wait_s() -> float:
    """Return how long this thread waited for a core since its start, in s; 0 if unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, LookupError, ValueError):
        return 0.0
