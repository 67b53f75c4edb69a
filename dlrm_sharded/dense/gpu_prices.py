"""Prices of the dense part on a GPU that is not at hand, from its data sheet.

Each kernel takes as long as its arithmetic, its memory traffic, or the launch of a kernel, whatever
is longest (the roofline model, Williams et al., CACM 2009). The layers are those of eager PyTorch;
implementations that fuse them, such as HugeCTR's, move fewer bytes and are faster.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.dense.work_trace import DenseWork, Kernels
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec
from dlrm_sharded.step.host_time import operators_prior_ms
from dlrm_sharded.step.parts import DenseTimes

PEAK_SHARE = 0.5
"""Part of the peak rate that matrix products of these sizes reach."""

BANDWIDTH_SHARE = 0.8
"""Part of the nominal memory bandwidth that element-wise kernels reach."""

KERNEL_MS = 0.004
"""Shortest time of a kernel with the gap to the next one."""

DENSE_ERROR = 0.5
"""Relative error that these prices are assumed to have: nobody measured them on a GPU yet."""

OPTIMIZER_KERNELS = 4
"""Kernels of a fused optimizer, with those that reset the gradients."""


def gpu_dense_times(
    work: DenseWork, spec: GpuSpec, *, bf16: bool, state_tensors: int, compiled: bool = False
) -> DenseTimes:
    """Price the dense part of a model on a GPU, and its launch by the host.

    Args:
        work: of one rank.
        bf16: whether matrix products are of bfloat16 numbers, or else of TF32 at half the rate.
            GPUs that have neither compute in fp32.
        state_tensors: tensors of the size of the weights that the optimizer keeps.
        compiled: whether the layers are compiled; only the time to launch them depends on it.

    Raises:
        ConfigError: the peak rate of the GPU is not known.
    """
    if spec.bf16_tflops is None:
        raise ConfigError(f"nothing is known of the arithmetic of {spec.device_name}")
    tflops = spec.fp32_tflops or spec.bf16_tflops / (1 if bf16 else 2)
    flop_per_ms = PEAK_SHARE * tflops * 1e9
    bytes_per_ms = BANDWIDTH_SHARE * spec.memory_gb_per_s * 1e6

    def layers_ms(kernels: Kernels) -> float:
        flop, num_bytes = kernels.reshape(-1, 2).T
        slower = np.maximum(flop / flop_per_ms, num_bytes / bytes_per_ms)
        return float(np.maximum(slower, KERNEL_MS).sum())

    phases = (work.bottom_forward, work.top_forward, work.top_backward, work.bottom_backward)
    num_operators = OPTIMIZER_KERNELS + sum(len(kernels) for kernels in phases)
    # the update reads weights, gradients and state, and writes weights, gradients and state
    updated_bytes = work.gradient_bytes * (4 + 2 * state_tensors)
    return DenseTimes(
        data_ms=0.0,
        bottom_forward_ms=layers_ms(work.bottom_forward),
        top_forward_ms=layers_ms(work.top_forward),
        top_backward_ms=layers_ms(work.top_backward),
        bottom_backward_ms=layers_ms(work.bottom_backward),
        optimizer_ms=updated_bytes / bytes_per_ms + OPTIMIZER_KERNELS * KERNEL_MS,
        launch_ms=operators_prior_ms(num_operators, compiled=compiled),
        gradient_bytes=work.gradient_bytes,
    )
