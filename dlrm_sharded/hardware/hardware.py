"""Hardware: a name for people, a fingerprint and a probe for comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.hardware.fingerprint import CpuFingerprint, Fingerprint, GpuFingerprint
from dlrm_sharded.hardware.probe import Probe


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a rank computes on.

    Args:
        name: name from `provenance.device_name`; machines of one name may differ.
        fingerprint, probe: None for files of before they were written.
    """

    name: str
    fingerprint: Fingerprint | None = None
    probe: Probe | None = None

    def to_meta(self) -> dict[str, Any]:
        """Return the entries for the header of an artefact."""
        return {
            "hardware": self.name,
            "fingerprint": None if self.fingerprint is None else self.fingerprint.to_json(),
            "probe": None if self.probe is None else self.probe.to_json(),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Hardware:
        """Read the entries of `to_meta` from a header, which may lack the last two.

        Raises:
            ValueError: an entry is damaged.
        """
        fingerprint, probe = meta.get("fingerprint"), meta.get("probe")
        return cls(
            meta["hardware"],
            None if fingerprint is None else Fingerprint.from_json(fingerprint),
            None if probe is None else Probe.from_json(probe),
        )

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report: the name, the fingerprint, the probe."""
        yield self.name
        if self.fingerprint is not None:
            yield f"fingerprint {self.fingerprint.id}: {fingerprint_text(self.fingerprint)}"
        if self.probe is not None:
            yield f"probe: {probe_text(self.probe)}"


def fingerprint_text(fingerprint: Fingerprint) -> str:
    """Return what is known of the device that the rank computes on, in one line."""
    gpu = fingerprint.gpu
    return ", ".join(filter(None, _of_cpu(fingerprint.cpu) if gpu is None else _of_gpu(gpu)))


def _of_cpu(cpu: CpuFingerprint) -> list[str | None]:
    return [
        cpu.architecture,
        cpu.vendor and f"{cpu.vendor} family {cpu.family} model {cpu.model}",
        cpu.instruction_sets and " ".join(cpu.instruction_sets),
        cpu.torch_capability and f"torch uses {cpu.torch_capability}",
        *cpu.switches,
        *(
            size and f"L{level} {size} KiB"
            for level, size in enumerate((cpu.l1_kib, cpu.l2_kib, cpu.l3_kib), start=1)
        ),
        f"{cpu.cores} cores",
        f"{cpu.threads} threads a rank",
    ]


def _of_gpu(gpu: GpuFingerprint) -> list[str | None]:
    return [
        f"{gpu.num_gpus} {gpu.name}",
        f"compute capability {gpu.capability}",
        f"{gpu.memory_gib} GiB",
        gpu.memory_gb_per_s and f"{gpu.memory_gb_per_s} GB/s",
        gpu.nvlinks and f"{gpu.nvlinks} NVLinks",
        gpu.pcie and f"PCIe {gpu.pcie}",
        gpu.nccl and f"NCCL {gpu.nccl}",
        gpu.driver and f"driver {gpu.driver}",
    ]


def probe_text(probe: Probe) -> str:
    """Return the figures of a probe in one line."""
    exchange = probe.exchange
    return ", ".join(
        [
            f"copy {probe.copy_gb_per_s:.3g} GB/s",
            f"random gather {probe.gather_gb_per_s:.3g} GB/s",
            f"gather in cache {probe.cached_gather_gb_per_s:.3g} GB/s",
            f"matrix product {probe.gemm_gflops:.4g} GFLOP/s",
            *(
                [
                    f"all-to-all of {exchange.num_ranks} ranks {exchange.latency_us:.3g} us and "
                    f"{exchange.gb_per_s:.3g} GB/s"
                ]
                if exchange
                else []
            ),
            f"beside a load of {probe.load:.2g}",
        ]
    )
