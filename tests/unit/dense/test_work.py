"""The work of a dense part is counted without data, and priced by the data sheet of a GPU."""

import dataclasses

import numpy as np
import pytest
import torch

from dlrm_sharded.dense.gpu_prices import (
    KERNEL_MS,
    OPTIMIZER_KERNELS,
    PEAK_SHARE,
    gpu_dense_times,
)
from dlrm_sharded.dense.work_trace import DenseWork, trace_dense_work
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.step.host_time import COMPILED_SHARE, OPERATOR_MS

TABLES = (Table("a", 100, 8, 1.0), Table("b", 10**12, 8, 1.0))
H100 = gpu_specs()["h100_sxm"]


def build(device: torch.device):
    return dlrm(TABLES, 3, dense_layers=[32, 8], over_layers=[16, 1], device=device)


def traced(batch_size: int) -> DenseWork:
    return trace_dense_work(build, TABLES, num_dense=3, local_batch_size=batch_size)


def test_layers_do_the_operations_of_their_matrices():
    work = traced(64)
    bottom = 2 * 64 * (3 * 32 + 32 * 8)
    assert work.bottom_forward[:, 0].sum() == bottom
    # backward: gradients of the weights and, except of the batch, of the inputs
    assert work.bottom_backward[:, 0].sum() == bottom + 2 * 64 * 32 * 8
    assert work.top_forward[:, 0].sum() > 2 * 64 * (16 + 8 * 16)
    assert work.top_forward[:, 0].sum() == pytest.approx(traced(32).top_forward[:, 0].sum() * 2)
    assert work.gradient_bytes == 4 * sum(
        parameter.numel()
        for name, parameter in build(torch.device("cpu")).named_parameters()
        if "embedding_bags" not in name
    )


def test_only_what_computes_is_a_kernel():
    """Fake mode asks tensors for their device all the time, which no GPU computes."""
    work = traced(64)
    # two products, with their biases, and two activations
    assert len(work.bottom_forward) == 4
    assert all(num_bytes > 0 for _, num_bytes in work.bottom_forward)


def test_small_layers_take_the_time_of_their_kernels():
    work = traced(1)
    times = gpu_dense_times(work, H100, bf16=True, state_tensors=0)
    assert times.bottom_forward_ms == pytest.approx(len(work.bottom_forward) * KERNEL_MS)
    assert times.gradient_bytes == work.gradient_bytes


@pytest.mark.parametrize("batch_size", [1, 4096])
def test_the_host_launches_operators_whatever_their_size(batch_size):
    work = traced(batch_size)
    counted = (work.bottom_forward, work.top_forward, work.top_backward, work.bottom_backward)
    num_operators = OPTIMIZER_KERNELS + sum(map(len, counted))
    times, compiled = (
        gpu_dense_times(work, H100, bf16=True, state_tensors=1, compiled=compiled)
        for compiled in (False, True)
    )
    assert times.launch_ms == pytest.approx(OPERATOR_MS * num_operators)
    assert compiled.launch_ms == pytest.approx(COMPILED_SHARE * times.launch_ms)
    assert times.total_ms == compiled.total_ms, "the device's time is that of eager layers"


PRODUCT, NOTHING = np.array([[1e13, 1e6]]), np.empty((0, 2))
LARGE_PRODUCTS = DenseWork(
    bottom_forward=NOTHING,
    top_forward=PRODUCT,
    top_backward=PRODUCT,
    bottom_backward=NOTHING,
    gradient_bytes=0,
)


def test_large_products_take_half_as_long_in_bf16():
    half, full = (
        gpu_dense_times(LARGE_PRODUCTS, H100, bf16=bf16, state_tensors=0) for bf16 in (True, False)
    )
    assert full.top_forward_ms == pytest.approx(2 * half.top_forward_ms)
    assert half.bottom_forward_ms == 0


def test_gpus_without_bf16_and_tf32_compute_in_fp32():
    v100 = gpu_specs()["v100_sxm"]
    for bf16 in (True, False):
        times = gpu_dense_times(LARGE_PRODUCTS, v100, bf16=bf16, state_tensors=0)
        assert times.top_forward_ms == pytest.approx(1e13 / (PEAK_SHARE * 15.7e9))


def test_a_gpu_without_a_peak_rate_cannot_be_priced():
    unknown = dataclasses.replace(H100, bf16_tflops=None)
    with pytest.raises(ConfigError, match="arithmetic"):
        gpu_dense_times(traced(1), unknown, bf16=True, state_tensors=0)
