"""Data sheets of GPUs: found by the names that CUDA gives, or stated by a user."""

import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.gpus.collectives import measured_curves
from dlrm_sharded.hardware.gpus.gpu_specs import (
    GENERIC,
    GpuSpec,
    find_gpu_spec,
    gpu_specs,
    named_gpu_spec,
)

STATED = {"memory_gb_per_s": 1675, "link_gb_per_s": 225}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("Tesla V100-SXM2-32GB", "v100_sxm"),
        ("b200", "b200_sxm"),
        ("L40S", "l40s"),
        ("h200_sxm", "h200_sxm"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("", None),
    ],
)
def test_found_by_name(name: str, key: str | None) -> None:
    spec = find_gpu_spec(name)
    assert (None if spec is None else spec.key) == key


def test_sheets_are_sound() -> None:
    specs = gpu_specs()
    assert GENERIC in specs
    for key, spec in specs.items():
        assert [find_gpu_spec(name) for name in (key, *spec.names)] == [spec] * (
            1 + len(spec.names)
        ), "no other GPU has this name"
        assert 100 < spec.memory_gb_per_s < 20_000
        assert 1 < spec.l2_mb < 500
        assert 30 < spec.multiprocessors < 200
        assert 1.0 < spec.clock_ghz < 3.0
        assert 15 < spec.memory_gib < 300
        assert (spec.link == "nvlink") == (spec.link_gb_per_s >= 100)
        assert 1 < spec.adapter_gb_per_s <= spec.link_gb_per_s
    assert {spec.collectives for spec in specs.values()} - {None} == {
        system for system, _, _ in measured_curves()
    }


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    message = r"^hardware is 'h101'; known are v100, .*v100_sxm, .*gb300"
    with pytest.raises(ConfigError, match=message):
        named_gpu_spec("h101", key="hardware")


def test_stated_figures() -> None:
    spec = GpuSpec.stated(STATED, key="cost_model.gpu")
    assert (spec.l2_mb, spec.adapter_gb_per_s) == (25.0, 25.0), "half of an H100's"
    assert (spec.link, spec.collectives) == ("nvlink", None)
    assert GpuSpec.stated(STATED | {"link_gb_per_s": 64}, key="x").link == "pcie"
    assert GpuSpec.stated(STATED | {"l2_mb": 7}, key="x").l2_mb == 7
    assert (spec.multiprocessors, spec.clock_ghz) == (66.0, 1.83)
    fast = GpuSpec.stated(STATED | {"multiprocessors": 100, "clock_ghz": 2}, key="x")
    assert fast.multiprocessor_ghz == 200.0
