"""The NVIDIA GPUs that are visible to processes on this machine, and the driver.

The Makefile runs this file as a script to choose an environment before any is installed, so it
imports only the standard library. The script prints one name for each GPU.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE_VARIABLE = "DLRM_SHARDED_DEVICE"
"""Environment variable that demands a type of device: cuda or cpu."""

DEVICE_FILES = Path("/dev")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
PCI_DEVICES, NUMA_NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
TIMEOUT_S = 60

IDLE = 0x1
SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80
"""Bits of NVML's reasons for a clock: slowdowns by hardware, for heat, and by the power supply.
A power limit (0x4) is usual under load, and only counts if it changes a clock."""

STEADY_CLOCKS = 1.05
"""Largest ratio of two clocks that count as the same."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """The clocks of a GPU in MHz, and NVML's bits for the reasons that limit them."""

    sm_mhz: int
    memory_mhz: int
    reasons: int


@dataclass(frozen=True, slots=True)
class GpuStates:
    """The states of a GPU before and after a measurement."""

    before: GpuState
    after: GpuState

    @property
    def is_disturbed(self) -> bool:
        """Whether the GPU was throttled, or its clocks changed although it was not idle."""
        reasons = self.before.reasons | self.after.reasons
        sm = (self.before.sm_mhz, self.after.sm_mhz)
        memory = (self.before.memory_mhz, self.after.memory_mhz)
        is_steady = all(max(clocks) <= STEADY_CLOCKS * min(clocks) for clocks in (sm, memory))
        return bool(reasons & SLOWDOWNS) or not (reasons & IDLE or is_steady)


def gpu_state(uuid: str) -> GpuState | None:
    """Return the state of a GPU; None if nvidia-smi does not report it, as for a MIG instance."""
    query = "--query-gpu=clocks.sm,clocks.mem,clocks_event_reasons.active"
    line = nvidia_smi(query, "--format=csv,noheader,nounits", "-i", uuid)
    found = re.fullmatch(r"\s*(\d+), (\d+), 0x([0-9a-fA-F]+)\s*", line)
    return None if found is None else GpuState(int(found[1]), int(found[2]), int(found[3], 16))


def cores_near_gpus(gpus: Sequence[str]) -> int:
    """Return how many of this process's cores each GPU can have on its own NUMA node.

    It is 0 if ranks cannot be bound: there is only one node, the node of a GPU is unknown, or
    numactl, which torch uses, is missing or does not work in this container.

    Args:
        gpus: names of GPUs as in CUDA_VISIBLE_DEVICES.
    """
    mine = os.sched_getaffinity(0)
    query = ("--query-gpu=pci.bus_id", "--format=csv,noheader", "-i", ",".join(gpus))
    nodes = [_numa_node(bus_id) for bus_id in nvidia_smi(*query).split()]
    num_nodes = len(list(NUMA_NODES.glob("node[0-9]*")))
    if num_nodes < 2 or len(nodes) != len(gpus) or min(nodes) < 0:
        return 0
    if not _output("numactl", f"--physcpubind={min(mine)}", "echo", "works"):
        return 0

    def num_cores(node: int) -> int:
        folders = (NUMA_NODES / f"node{node}").glob("cpu[0-9]*")
        return len(mine & {int(folder.name[3:]) for folder in folders})

    return min(num_cores(node) // count for node, count in collections.Counter(nodes).items())


def _numa_node(bus_id: str) -> int:
    """Return the NUMA node of a PCI device, or -1 if it is unknown."""
    file = PCI_DEVICES / bus_id.lower()[-12:] / "numa_node"  # nvidia-smi's have longer domains
    return int(file.read_text()) if file.exists() else -1


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names, as in CUDA_VISIBLE_DEVICES, of the GPUs that a process would see.

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

    If nvidia-smi is missing or fails, for example between a driver update and the reboot, this
    counts the device files that the process may open; a scheduler may deny access to some of them.
    """
    if listed := re.findall(r"^GPU \d", nvidia_smi("-L"), re.MULTILINE):
        return len(listed)
    return sum(os.access(file, os.W_OK) for file in DEVICE_FILES.glob("nvidia[0-9]*"))


def nvidia_smi(*options: str) -> str:
    """Return the output of nvidia-smi; empty if it is missing, fails or hangs."""
    return _output("nvidia-smi", *options)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


if __name__ == "__main__":
    print(*visible_gpus(), sep="\n")
