"""Collectives within a host: measured ones, and what follows for other GPUs."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.hardware.gpus.collectives import COLLECTIVES, HostCollectives, measured_curves
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs

H100 = gpu_specs()["h100_sxm"]
MEASURED = {spec.collectives: spec for spec in gpu_specs().values() if spec.collectives}


def test_measured_times_are_met() -> None:
    for (system, collective, num_gpus), curve in measured_curves().items():
        if system == "l40s":
            continue  # see test_pcie_is_between_its_two_kinds_of_hosts
        host = HostCollectives(MEASURED[system])
        found = [host.time_ms(collective, num_gpus, b) for b in curve.sent_bytes.tolist()]
        np.testing.assert_allclose(found, curve.ms, rtol=1e-9)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_between_and_beyond_the_measured(collective: str) -> None:
    def ms(num_gpus: int, sent_bytes: float) -> float:
        return HostCollectives(H100).time_ms(collective, num_gpus, sent_bytes)

    assert ms(1, 1e9) == 0
    assert min(ms(4, 1e7), ms(8, 1e7)) < ms(6, 1e7) < max(ms(4, 1e7), ms(8, 1e7))
    assert ms(8, 1e7) <= ms(16, 1e7) < 1.1 * ms(8, 1e7)
    assert ms(8, 0.0) == ms(8, 1.0) < 0.02, "latency"
    assert ms(8, 4e9) == pytest.approx(2 * ms(8, 2e9), rel=0.05), "bandwidth"


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_stated_bandwidth_scales_bytes_and_keeps_latency(factor: float) -> None:
    host, stated = HostCollectives(H100), H100.link_gb_per_s * factor
    for sent_bytes in (0.0, 1e6, 1e8):
        found = host.time_ms("alltoall", 8, sent_bytes, link_gb_per_s=stated)
        assert found == pytest.approx(host.time_ms("alltoall", 8, sent_bytes / factor))


@pytest.mark.parametrize("key", ["l4", "l40s"])
def test_pcie_is_between_its_two_kinds_of_hosts(key: str) -> None:
    """One passes all through its memory, as the only one that was measured; in one GPUs reach each
    other, as with NVLink."""
    host = HostCollectives(gpu_specs()[key])
    as_nvlink = HostCollectives(
        dataclasses.replace(gpu_specs()[key], link="nvlink", collectives=None)
    )
    for collective in COLLECTIVES:
        curve = measured_curves()["l40s", collective, 4]
        for sent_bytes, measured_ms in zip(curve.sent_bytes.tolist(), curve.ms, strict=True):
            ms = host.time_ms(collective, 4, sent_bytes)
            product = measured_ms * as_nvlink.time_ms(collective, 4, sent_bytes)
            assert ms == pytest.approx(product**0.5)
