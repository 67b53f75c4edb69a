"""When two pieces of hardware are the same, and what is said if they are not."""

import dataclasses

import pytest

from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.hardware.match import compare
from tests.unit.hardware.synthetic import (
    HARDWARE,
    ON_GPU,
    with_cpu,
    with_exchange,
    with_gpu,
    with_probe,
)

SPEED = "x the speed of the artifact's machine"
SAME = {
    "itself": HARDWARE,
    "another_name": dataclasses.replace(HARDWARE, name="cpu: y"),
    "what_is_not_known_here": with_cpu(l3_kib=None, instruction_sets=None),
    "a_loaded_machine": with_probe(
        copy_gb_per_s=0.8, gather_gb_per_s=0.8, cached_gather_gb_per_s=0.8
    ),
    "a_busy_moment": with_probe(gather_gb_per_s=1 / 1.5),
}
DIFFERENT = {
    "avx2_only": (
        with_cpu(instruction_sets=("avx2", "fma"), torch_capability="AVX2"),
        (
            "instruction sets: avx512bw, avx512dq, avx512f, avx512vl there only",
            "torch capability: AVX2 here, AVX512 there",
        ),
    ),
    "another_model": (with_cpu(model="1"), ("model: 1 here, 17 there",)),
    "more_cores": (with_cpu(cores=8), ("cores: 8 here, 2 there",)),
    "more_threads": (with_cpu(threads=2), ("threads: 2 here, 1 there",)),
    "a_switch": (with_cpu(switches=("A=1",)), ("switches: A=1 here only",)),
    "half_the_speed": (with_probe(gather_gb_per_s=0.5), (f"random gather: 0.5 {SPEED}",)),
    "twice_the_speed": (with_probe(copy_gb_per_s=2), (f"memory bandwidth: 2 {SPEED}",)),
    "slow_links": (with_exchange(gb_per_s=0.4), (f"all-to-all bandwidth: 0.4 {SPEED}",)),
}


@pytest.mark.parametrize("ours", SAME.values(), ids=SAME)
def test_the_same(ours: Hardware) -> None:
    match = compare(ours, HARDWARE)
    assert (match.is_same, match.reasons) == (True, ())
    assert match.has_same_fingerprint


@pytest.mark.parametrize(("ours", "reasons"), DIFFERENT.values(), ids=DIFFERENT)
def test_different(ours: Hardware, reasons: tuple[str, ...]) -> None:
    match = compare(ours, HARDWARE)
    assert not match.is_same
    assert match.reasons == reasons


def test_without_a_fingerprint_or_a_probe_nothing_is_the_same() -> None:
    older = Hardware("cpu: x")
    assert compare(HARDWARE, older).reasons == ("the hardware there has no fingerprint",)
    unprobed = dataclasses.replace(HARDWARE, probe=None)
    match = compare(HARDWARE, unprobed)
    assert match.reasons == ("the speed there was not probed",)
    assert (match.is_same, match.has_same_fingerprint) == (False, True)


def test_gpus() -> None:
    assert compare(with_cpu(ON_GPU, cores=64, model="1"), ON_GPU).is_same
    assert compare(with_gpu(nccl="2.28.1", driver="1", nvlinks=None), ON_GPU).is_same
    assert compare(with_gpu(num_gpus=1), ON_GPU).is_same
    assert compare(with_gpu(name="GPU B"), ON_GPU).reasons == ("name: GPU B here, GPU A there",)
    match = compare(ON_GPU, HARDWARE)
    assert match.reasons == ("GPU A here, cpu: x there",)
    assert (match.compute_factor, match.exchange_factor) == (1.0, 1.0)


def test_factors_between_the_speeds() -> None:
    """Half the speed takes twice the time, in memory and caches alike."""
    ours = with_probe(copy_gb_per_s=0.8, gather_gb_per_s=0.5, cached_gather_gb_per_s=0.5)
    match = compare(ours, HARDWARE)
    assert match.compute_factor == pytest.approx(2)
    assert match.exchange_factor == 1
    assert match.distance == pytest.approx(2)
    alone = dataclasses.replace(ours, probe=dataclasses.replace(ours.probe, exchange=None))
    assert compare(alone, HARDWARE).exchange_factor == pytest.approx(1 / 0.8)
