"""Reads the fingerprint of the CPU: /proc, sysfs, and switches of the libraries that compute."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from dlrm_sharded.hardware.fingerprint import CpuFingerprint

X86_SETS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
MATRIX_SETS = ("avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
ARM_SETS = ("asimd", "sve", "sve2", "bf16", "i8mm")
INSTRUCTION_SETS = frozenset((*X86_SETS, *MATRIX_SETS, *ARM_SETS))
"""Flags of /proc/cpuinfo by which FBGEMM, torch and MKL choose their kernels."""

SWITCHES = (
    "FBGEMM_ENABLE_INSTRUCTIONS",
    "FBGEMM_ENABLE_AVX512_256",
    "FBGEMM_NO_ASMJIT",
    "FBGEMM_NO_AUTOVEC",
    "FBGEMM_FORCE_AUTOVEC",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)
"""Environment variables that keep these libraries from using some of the instruction sets.

The effect of torch's ATEN_CPU_CAPABILITY shows in the capability that torch reports.
"""

PROC_KEYS = {
    "vendor": ("vendor_id", "CPU implementer"),
    "family": ("cpu family", "CPU architecture"),
    "model": ("model", "CPU part"),
}
"""Keys of /proc/cpuinfo on x86 and on Arm."""


def read_cpu(
    *,
    threads: int,
    torch_capability: str | None,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> CpuFingerprint:
    """Return the fingerprint of this machine's CPU.

    Args:
        threads: number of threads of a rank.
        torch_capability: what `torch.backends.cpu.get_cpu_capability` returns.
        root: folder that has `proc` and `sys`; fields whose files are missing there are unknown.
    """
    info = _first_processor(_read(root / "proc" / "cpuinfo"))
    flags = info.get("flags") or info.get("Features")
    known = {
        field: next((info[key] for key in keys if info.get(key)), None)
        for field, keys in PROC_KEYS.items()
    }
    caches = _caches_kib(root / "sys/devices/system/cpu/cpu0/cache")
    return CpuFingerprint(
        architecture=platform.machine() or None,
        **known,
        instruction_sets=tuple(sorted(INSTRUCTION_SETS & set(flags.split()))) if flags else None,
        torch_capability=torch_capability,
        switches=tuple(f"{key}={environment[key]}" for key in SWITCHES if environment.get(key)),
        l1_kib=caches.get(1),
        l2_kib=caches.get(2),
        l3_kib=caches.get(3),
        cores=_num_cores(root / "sys/fs/cgroup/cpu.max"),
        threads=threads,
    )


def _first_processor(text: str) -> dict[str, str]:
    """Return the entries of the first processor in /proc/cpuinfo."""
    lines = text.partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _caches_kib(folder: Path) -> dict[int, int]:
    """Return the size in KiB of a data cache by its level."""
    sizes = {}
    for cache in sorted(folder.glob("index*")):
        level, size = _read(cache / "level").strip(), _read(cache / "size").strip()
        is_data = _read(cache / "type").strip() in ("Data", "Unified")
        if is_data and level.isdigit() and size.endswith("K") and size[:-1].isdigit():
            sizes[int(level)] = int(size[:-1])
    return {level: size for level, size in sizes.items() if size}


def _num_cores(limit: Path) -> int:
    """Return how many cores this process may use, within the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(limit).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read, as in some containers."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
