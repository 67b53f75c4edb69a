"""The fingerprint: what the hardware of a rank is, as far as its costs depend on it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.limited import PositiveInt

INFORMATIVE = ("driver", "nccl", "num_gpus")
"""Fields in which the same hardware may differ; the probe shows what they change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFingerprint:
    """A CPU, and what a rank uses of it. None stands for what cannot be read here.

    Args:
        architecture: as in `uname -m`.
        vendor, family, model: as in /proc/cpuinfo; on Arm the implementer, architecture and part.
        instruction_sets: the `cpu.INSTRUCTION_SETS` that the CPU has, sorted.
        torch_capability: best instruction set that torch's own kernels use.
        switches: environment variables of `cpu.SWITCHES` that are set, as NAME=value.
        l1_kib, l2_kib, l3_kib: size of one data cache of each level.
        cores: number of cores that this process may use.
        threads: number of threads of a rank.
    """

    architecture: str | None = None
    vendor: str | None = None
    family: str | None = None
    model: str | None = None
    instruction_sets: tuple[str, ...] | None = None
    torch_capability: str | None = None
    switches: tuple[str, ...]
    l1_kib: PositiveInt | None = None
    l2_kib: PositiveInt | None = None
    l3_kib: PositiveInt | None = None
    cores: PositiveInt
    threads: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFingerprint:
    """A GPU, its links and its host. None stands for what cannot be read here.

    Args:
        capability: compute capability, such as "9.0".
        memory_gb_per_s: peak bandwidth of the memory, from its clock and width.
        nvlinks: number of active NVLinks, or None if there are none or it is not known.
        pcie: largest generation and width of the PCIe link, such as "5x16".
        num_gpus: number of GPUs that this process sees on the host.
        nccl, driver: versions.
    """

    name: str
    capability: str
    memory_gib: PositiveInt
    memory_gb_per_s: PositiveInt | None = None
    nvlinks: PositiveInt | None = None
    pcie: str | None = None
    num_gpus: PositiveInt
    nccl: str | None = None
    driver: str | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The CPU of a rank, and its GPU if it computes on one."""

    cpu: CpuFingerprint
    gpu: GpuFingerprint | None = None

    @property
    def device(self) -> str:
        """Return the type of the device that the rank computes on, "cpu" or "cuda"."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def computing(self) -> dict[str, Any]:
        """Return what the costs depend on: the fields of the GPU if there is one, else the CPU's.

        `INFORMATIVE` ones are left out. The CPU of the host does not change the lookups of a GPU.
        """
        fields = dataclasses.asdict(self.cpu if self.gpu is None else self.gpu)
        return {key: value for key, value in fields.items() if key not in INFORMATIVE}

    @property
    def id(self) -> str:
        """Return a short hash of `computing`, the same in every process and version of Python."""
        text = json.dumps(self.computing, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"id": self.id, **json.loads(json.dumps(dataclasses.asdict(self)))}
