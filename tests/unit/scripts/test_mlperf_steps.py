"""MLPerf's published steps: the parts of the prediction, and steps of several hosts."""

import pytest

from benchmarks.mlperf_steps import (
    DENSE_WEIGHTS,
    MLPERF_STEPS,
    PRODUCTS_MS,
    _layers_ms,
    _products_ms,
    _updates_ms,
    mlperf_task,
    predicted_step,
    prior_model,
)
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs

LAYERS = (
    *[(3456, 512), (512, 3456)] * 3,
    *[(3456, 1024), (1024, 1024), (1024, 512), (512, 256)],
    *[(512, 256), (256, 128)],
)


def test_the_weights_are_those_of_the_layers() -> None:
    assert sum(rows * cols for rows, cols in LAYERS) == pytest.approx(DENSE_WEIGHTS, rel=0.01)


@pytest.mark.parametrize("key", ["a100_sxm_80gb", "h100_sxm", "h200_sxm", "b200_sxm", "gb200"])
@pytest.mark.parametrize("num_samples", [1056, 6912])
def test_products_reach_a_part_of_the_peak(key: str, num_samples: int) -> None:
    spec = gpu_specs()[key]
    assert spec.bf16_tflops is not None
    flop = 6 * DENSE_WEIGHTS * num_samples
    share = flop / _products_ms(spec, num_samples) / spec.bf16_tflops / 1e9
    assert 0.2 < share < 0.8
    assert _layers_ms(spec, num_samples) > _products_ms(spec, num_samples)


def test_a_gpu_without_measured_products_has_an_h100s_by_its_peak() -> None:
    h100, pcie = gpu_specs()["h100_sxm"], gpu_specs()["h100_pcie"]
    assert pcie.collectives not in PRODUCTS_MS
    assert _products_ms(pcie, 4096) == pytest.approx(_products_ms(h100, 4096) * 989 / 756)


def test_updates_take_the_all_reduce_and_the_memory() -> None:
    spec = gpu_specs()["h100_sxm"]
    curves = prior_model(spec).exchange_curves
    assert curves is not None
    ms = _updates_ms(spec, mlperf_task(8, 55_296, spec), curves)
    assert 20 * DENSE_WEIGHTS / (0.8 * 3350e6) < ms < 1.0


@pytest.mark.parametrize(("gpu", "num_gpus"), [("b200_sxm", 16), ("h100_sxm", 64)])
def test_steps_of_several_hosts_are_predicted(gpu: str, num_gpus: int) -> None:
    step = next(s for s in MLPERF_STEPS if (s.gpu, s.num_gpus) == (gpu, num_gpus))
    row = predicted_step(step)
    assert row["predicted_ms"] == pytest.approx(step.measured_ms, rel=0.15)
    parts = row["dense_ms"] + row["lookups_ms"] + row["exchanges_ms"]
    assert row["predicted_ms"] == pytest.approx(parts, rel=0.02)
