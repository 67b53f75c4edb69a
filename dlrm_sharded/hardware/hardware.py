"""Hardware: a name for people, a fingerprint and a probe for comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.hardware.fingerprint import CpuFingerprint, Fingerprint, GpuFingerprint
from dlrm_sharded.hardware.probe import Probe


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine or GPU that a rank computes on.

    Args:
        name: name from `provenance.device_name`; machines of one name may differ.
        fingerprint, probe: None if an older file does not have them.
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
    def from_meta(cls, meta: Mapping[str, Any], *, name: str = "the hardware") -> Hardware:
        """Read the entries of `to_meta` from a header, which may lack the last two.

        Args:
            name: what has the entries, for messages.

        Raises:
            DataError: an entry is damaged.
        """
        fields = {**meta, "name": meta.get("hardware")}
        return read_form(fields, cls, name=name, may_have_others=True)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report: the name, the fingerprint, the probe."""
        yield self.name
        if self.fingerprint is not None:
            yield f"fingerprint {self.fingerprint.id}: {fingerprint_text(self.fingerprint)}"
        if self.probe is not None:
            yield f"probe: {probe_text(self.probe)}"


def fingerprint_text(fingerprint: Fingerprint) -> str:
    """Return what is known of the device that the rank computes on, in one line."""
    known = _of_cpu(fingerprint.cpu) if fingerprint.gpu is None else _of_gpu(fingerprint.gpu)
    return ", ".join(text for value, text in known if value)


def _of_cpu(cpu: CpuFingerprint) -> list[tuple[object, str]]:
    """Return pairs of a value, which may be unknown, and its text."""
    caches = enumerate((cpu.l1_kib, cpu.l2_kib, cpu.l3_kib), start=1)
    return [
        (cpu.architecture, f"{cpu.architecture}"),
        (cpu.vendor, f"{cpu.vendor} family {cpu.family} model {cpu.model}"),
        (cpu.instruction_sets, " ".join(cpu.instruction_sets or ())),
        (cpu.torch_capability, f"torch uses {cpu.torch_capability}"),
        (cpu.switches, " ".join(cpu.switches)),
        *((size, f"L{level} {size} KiB") for level, size in caches),
        (cpu.cores, f"{cpu.cores} cores"),
        (cpu.threads, f"{cpu.threads} threads a rank"),
    ]


def _of_gpu(gpu: GpuFingerprint) -> list[tuple[object, str]]:
    """Return the same of a GPU."""
    return [
        (gpu.num_gpus, f"{gpu.num_gpus} {gpu.name}"),
        (gpu.capability, f"compute capability {gpu.capability}"),
        (gpu.memory_gib, f"{gpu.memory_gib} GiB"),
        (gpu.memory_gb_per_s, f"{gpu.memory_gb_per_s} GB/s"),
        (gpu.nvlinks, f"{gpu.nvlinks} NVLinks"),
        (gpu.pcie, f"PCIe {gpu.pcie}"),
        (gpu.nccl, f"NCCL {gpu.nccl}"),
        (gpu.driver, f"driver {gpu.driver}"),
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
