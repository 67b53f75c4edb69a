"""Synthetic hardware: a server's CPU, its probe, and a GPU."""

import dataclasses
from typing import Any

from dlrm_sharded.hardware.fingerprint import CpuFingerprint, Fingerprint, GpuFingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.hardware.probe import ExchangeProbe, Probe

AVX512 = ("avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl", "fma")
CPU = CpuFingerprint(
    architecture="x86_64",
    vendor="AuthenticAMD",
    family="25",
    model="17",
    instruction_sets=AVX512,
    torch_capability="AVX512",
    switches=(),
    l1_kib=32,
    l2_kib=1024,
    l3_kib=32768,
    cores=2,
    threads=1,
)
GPU = GpuFingerprint(
    name="GPU A",
    capability="9.0",
    memory_gib=80,
    memory_gb_per_s=3352,
    nvlinks=18,
    pcie="5x16",
    num_gpus=8,
    nccl="2.27.3",
    driver="580.1",
)
EXCHANGE = ExchangeProbe(num_ranks=4, ranks_per_host=4, latency_us=300.0, gb_per_s=1.0)
PROBE = Probe(
    copy_gb_per_s=24.0,
    gather_gb_per_s=8.0,
    cached_gather_gb_per_s=90.0,
    load=0.5,
    exchange=EXCHANGE,
)
HARDWARE = Hardware("cpu: x", Fingerprint(CPU), PROBE)
ON_GPU = Hardware("GPU A", Fingerprint(CPU, GPU), PROBE)


def with_cpu(hardware: Hardware = HARDWARE, **changes: Any) -> Hardware:
    """The hardware with other fields of the CPU."""
    cpu = dataclasses.replace(hardware.fingerprint.cpu, **changes)
    return dataclasses.replace(
        hardware, fingerprint=dataclasses.replace(hardware.fingerprint, cpu=cpu)
    )


def with_gpu(**changes: Any) -> Hardware:
    """The GPU with other fields."""
    return dataclasses.replace(
        ON_GPU, fingerprint=Fingerprint(CPU, dataclasses.replace(GPU, **changes))
    )


def with_exchange(**changes: Any) -> Hardware:
    """The hardware with other figures of its exchange probe."""
    exchange = dataclasses.replace(EXCHANGE, **changes)
    return dataclasses.replace(HARDWARE, probe=dataclasses.replace(PROBE, exchange=exchange))


def with_probe(hardware: Hardware = HARDWARE, **factors: float) -> Hardware:
    """The hardware with figures of its probe multiplied by factors."""
    figures = {name: getattr(hardware.probe, name) * factor for name, factor in factors.items()}
    return dataclasses.replace(hardware, probe=dataclasses.replace(hardware.probe, **figures))
