"""Fingerprints are read from a synthetic /proc and sysfs, and from what nvidia-smi prints."""

import json
from pathlib import Path

import pytest

from dlrm_sharded.hardware.cpu import read_cpu
from dlrm_sharded.hardware.cuda import count_nvlinks, pcie_link
from dlrm_sharded.hardware.fingerprint import CpuFingerprint
from dlrm_sharded.hardware.hardware import Hardware
from tests.unit.hardware.synthetic import AVX512, HARDWARE, ON_GPU, with_cpu, with_gpu

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 fma avx512f avx512bw avx512vl avx512dq clzero

processor\t: 1
vendor_id\t: other
flags\t\t: avx2
"""
ARM = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd sve bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
"""


def machine(root: Path, cpuinfo: str = X86) -> Path:
    """Write a synthetic /proc and sysfs."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(cpuinfo)
    caches = [(1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "1024K")]
    for index, (level, kind, size) in enumerate([*caches, (3, "Unified", "32768K")]):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    return root


def cpu_of(root: Path, **environment: str) -> CpuFingerprint:
    return read_cpu(threads=3, torch_capability="AVX512", root=root, environment=environment)


def test_x86(tmp_path: Path) -> None:
    cpu = cpu_of(machine(tmp_path))
    assert (cpu.vendor, cpu.family, cpu.model) == ("AuthenticAMD", "25", "17")
    assert cpu.instruction_sets == AVX512
    assert (cpu.l1_kib, cpu.l2_kib, cpu.l3_kib) == (32, 1024, 32768)
    assert (cpu.threads, cpu.torch_capability, cpu.switches) == (3, "AVX512", ())
    assert cpu.cores >= 1


def test_arm(tmp_path: Path) -> None:
    cpu = cpu_of(machine(tmp_path, ARM))
    assert (cpu.vendor, cpu.family, cpu.model) == ("0x41", "8", "0xd40")
    assert cpu.instruction_sets == ("asimd", "bf16", "i8mm", "sve")


def test_a_container_without_proc_and_sysfs(tmp_path: Path) -> None:
    cpu = cpu_of(tmp_path)
    assert (cpu.vendor, cpu.family, cpu.model, cpu.instruction_sets) == (None,) * 4
    assert (cpu.l1_kib, cpu.l2_kib, cpu.l3_kib) == (None,) * 3
    assert cpu.cores >= 1


@pytest.mark.parametrize("limit", ["100000 100000", "50000 100000"])
def test_the_quota_of_a_container(limit: str, tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    unlimited = cpu_of(tmp_path).cores
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert cpu_of(tmp_path).cores == unlimited
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{limit}\n")
    assert cpu_of(tmp_path).cores == 1


@pytest.mark.parametrize("hardware", [HARDWARE, ON_GPU, Hardware("cpu: x")], ids=lambda h: h.name)
def test_json_and_back(hardware: Hardware) -> None:
    written = json.loads(json.dumps(hardware.to_meta()))
    assert Hardware.from_meta(written) == hardware
    assert Hardware.from_meta({"hardware": "cpu: x"}) == Hardware("cpu: x")


def test_a_gpus_id_depends_on_its_kind_alone() -> None:
    others = with_gpu(driver="590.0", nccl="2.28.1"), with_gpu(num_gpus=1)
    for same in (with_cpu(ON_GPU, cores=64), *others):
        assert same.fingerprint.id == ON_GPU.fingerprint.id


def test_what_nvidia_smi_prints() -> None:
    status = "GPU 0: X (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    assert count_nvlinks(status) == 2
    assert count_nvlinks(f"{status}\t Link 2: <inactive>\n") == 2
    assert count_nvlinks("") is None
    assert pcie_link("5, 16\n") == "5x16"
    assert pcie_link("[N/A], [N/A]") is None
