"""Versions, the driver, and the bandwidths of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import torch

from dlrm_sharded.files.versions import readable_versions
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.gpus import nvidia_smi
from dlrm_sharded.ranks.host_memory import available_host_bytes
from dlrm_sharded.ranks.stopwatch import Stopwatch
from studies.study import StudyRun

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "polars", "hydra-core")
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG")
GPU_QUERY = (
    "name,driver_version,memory.total,memory.used,clocks.max.sm,clocks.max.mem,power.limit,"
    "mig.mode.current,ecc.mode.current,utilization.gpu"
)
REPEATS = 10


def run(study: StudyRun) -> None:
    study.record("nvidia_smi", gpu_fields())
    study.record("machine", machine())
    device = study.device()
    import fbgemm_gpu  # noqa: F401  # loads kernels that must be built for this torch and CUDA

    if device.type == "cuda":
        study.record("gpu", gpu(device))
    size = GIB // 64 if study.small else GIB
    rates = bandwidths(device, size)
    study.record("gb_per_s", rates)
    study.record("matmul_tflop_per_s", matmul_speeds(device, 512 if study.small else 8192))
    study.show(torch=torch.__version__, **{name: f"{rate} GB/s" for name, rate in rates.items()})


def gpu_fields() -> dict[str, str] | str:
    """Return what nvidia-smi says of the first GPU, if it says anything."""
    text = nvidia_smi(f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")
    if not text:
        return "nvidia-smi is missing, fails or hangs"
    return dict(zip(GPU_QUERY.split(","), text.splitlines()[0].split(", "), strict=True))


def machine() -> dict[str, object]:
    """Return the versions of what figures depend on, and the machine's cores and memory."""
    return {
        "python": platform.python_version(),
        "packages": readable_versions(PACKAGES),
        "cuda_of_torch": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "available_gib": round(available_host_bytes() / GIB, 1),
        "environment": {key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
    }


def gpu(device: torch.device) -> dict[str, object]:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": getattr(properties, "L2_cache_size", 0) / 2**20,
        "free_gib": round(free_bytes / GIB, 2),
        "total_gib": round(total_bytes / GIB, 2),
        "count": torch.cuda.device_count(),
    }


def bandwidths(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Return rates of copies in GB/s; a copy on the device counts what it reads and writes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copies = {"device": (lambda: target.copy_(source), 2)}
    if device.type == "cuda":
        pageable = torch.ones(num_bytes // 4)
        pinned = pageable.pin_memory()
        copies |= {
            "to_device": (lambda: target.copy_(pinned, non_blocking=True), 1),
            "to_device_pageable": (lambda: target.copy_(pageable), 1),
            "to_host": (lambda: pinned.copy_(source, non_blocking=True), 1),
        }
    return {
        name: round(times * num_bytes / time_ms(copy, device) / 1e6, 1)
        for name, (copy, times) in copies.items()
    }


def matmul_speeds(device: torch.device, size: int) -> dict[str, float]:
    """Return the speed of a square matrix product by precision; TF32 on a GPU only."""
    speeds = {}
    precisions = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cpu":
        del precisions["tf32"]
    for name, dtype in precisions.items():
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        factor = torch.ones(size, size, device=device, dtype=dtype)
        once_ms = time_ms(lambda factor=factor: factor @ factor, device)  # type: ignore[misc]
        speeds[name] = round(2 * size**3 / once_ms / 1e9, 3)
    return speeds


def time_ms(work: Callable[[], object], device: torch.device) -> float:
    """Return the mean time of work that is launched several times in a row."""
    for _ in range(2):
        work()
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(REPEATS):
        work()
    watch.mark()
    [total_ms] = watch.intervals_ms()
    return total_ms / REPEATS
