"""Lookups on GPUs that nobody calibrated: a roofline of memory, multiprocessors and launches.

The time of bytes from memory is inversely proportional to the nominal memory bandwidth. The work of
the multiprocessors takes a number of cycles: samples, ids, sorting, warps, and rows from the L2
cache. These figures are the same for all GPUs. They were fitted to public measurements on two kinds
of H100 and a V100, which are in `tests/unit/cost/public_lookups.py`; docs/notes/gpus.md says how
well a fit without one of these sources predicts that source. Two figures are not fitted:

- `SORT_CYCLES`: Onesweep sorts 29.4 G keys of 4 B per second in 4 passes on an A100
  (arXiv:2206.01784); FBGEMM sorts pairs of 12 B, and 3 times the bytes take 3 times as long.
- `KERNEL_MS`: aiconfigurator's time of a launch, times the number of kernels of a lookup.
"""

from __future__ import annotations

import math

import numpy as np

from dlrm_sharded.cost.compute import ComputeModel, CostNet, DenseCosts
from dlrm_sharded.cost.features import DEVICE_WORK, LINE_COLUMNS, PROFILE, DeviceWork
from dlrm_sharded.cost.widest import WidestShard
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec

STREAM_SHARE = 0.8
"""Fraction of the nominal memory bandwidth that streaming reaches, according to aiconfigurator."""


SAMPLE_CYCLES = 15.1
"""Cycles of a multiprocessor per sample of a table in the forward pass."""

ID_CYCLES, BACKWARD_ID_CYCLES = 5.9, 23.6
"""Cycles per id in the forward pass, and in the backward pass without its sort."""

WARP_CYCLES = 4.5
"""Cycles per warp that handles a row, in each direction."""

LINE_CYCLES = 2.1
"""Cycles per cache line of a row or a gradient that comes from the L2 cache."""

UPDATE_FACTOR = 1.8
"""Time of a line that an update reads or writes, as a multiple of the time that its bytes take at
the nominal bandwidth. A line of pooled vectors takes that time once, as does one from beyond the L2
cache, in addition to its cycles."""

SORT_CYCLES = 4.0
"""Cycles per id in one pass of the backward pass's radix sort."""

KERNEL_MS = 0.003
NUM_KERNELS = (3, 15)
"""Kernels of a lookup's forward and backward pass."""

LEFT_OUT_ERRORS = {"h100": 0.13, "v100": 0.28}
"""Mean relative error of public lookups, by GPU, predicted by a fit without their source; of two
sources, the larger error."""

MEASURED_ERROR = 0.41
"""Mean relative error of 30 plans measured on an H200 with row-wise Adagrad (docs/notes/gpus.md).
Of lookups of 0.02 to 5 ms, those below 0.1 ms take twice as long as predicted."""

LOOKUP_ERROR = 0.5
"""Expected relative error of lookups: the largest of these errors, rounded up."""

DENSE_PASSES = 10
"""Times that the gradients or weights of a replica go through memory in a step: cleared (1), added
to (1), copied to the all-reduce and divided there (4), read with the weights and the optimizer's
state to update these (4)."""

DEFAULT_OPTIMIZER = "rowwise_adagrad"
UPDATE_LINES = {
    "sgd": (2.0, 0.0),
    "rowwise_adagrad": (2.0, 1.0),
    "elementwise_adagrad": (4.0, 0.0),
    "adam": (6.0, 0.0),
}
"""Cache lines that an update reads and writes for each line of a row, and for each row."""

_NO_COST_MS = 1e-12
_MAX_PROFILE = 20.0


def cycles_ms(spec: GpuSpec, cycles: float) -> float:
    """Return the time of 1,000 pieces of work that take a multiprocessor `cycles` each."""
    return cycles / spec.multiprocessor_ghz / 1e3


def gpu_compute(spec: GpuSpec, optimizer: str | None) -> ComputeModel:
    """Return the computation of lookups on a GPU, with a fused optimizer of the tables."""
    work = DEVICE_WORK["cuda"]
    line_ms = FLOAT_BYTES * LINE_COLUMNS * 1e3 / (spec.memory_gb_per_s * 1e6)
    update_ms = UPDATE_FACTOR * line_ms
    update_lines, row_lines = UPDATE_LINES[optimizer or DEFAULT_OPTIMIZER]
    near_ms = cycles_ms(spec, LINE_CYCLES)
    forward = {
        "bags": cycles_ms(spec, SAMPLE_CYCLES),
        "pooled_columns": line_ms,
        "ids": cycles_ms(spec, ID_CYCLES),
        **_cached(work, "rows", near_ms, line_ms, spec.l2_mb),
    }
    backward = {
        "ids": cycles_ms(spec, BACKWARD_ID_CYCLES),
        "id_sort_passes": cycles_ms(spec, SORT_CYCLES),
        **_cached(work, "gradients", near_ms, line_ms, spec.l2_mb),
        "unique_ids": row_lines * update_ms,
        "unique_lines": update_lines * update_ms,
    }
    num_profile = len(PROFILE)
    return ComputeModel(
        profile_mean=np.zeros(num_profile),
        profile_std=np.ones(num_profile),
        profile_low=np.zeros(num_profile),
        profile_high=np.full(num_profile, _MAX_PROFILE),
        forward=_constant_net(work, forward, NUM_KERNELS[0]),
        backward=_constant_net(work, backward, NUM_KERNELS[1]),
        device=work,
        # thread groups as large as the widest shard needs slow down the ids of all shards
        crowding=WidestShard(np.full((2, 2), cycles_ms(spec, WARP_CYCLES))),
        dense=DenseCosts(mb_ms=DENSE_PASSES / (STREAM_SHARE * spec.memory_gb_per_s)),
    )


def _constant_net(work: DeviceWork, unit_costs: dict[str, float], num_kernels: int) -> CostNet:
    """Return a net whose unit costs depend on no profile, and on caches only through its terms.

    Args:
        unit_costs: ms per 1,000, by names of `DeviceWork.terms`; other terms cost next to nothing.
    """
    assert unit_costs.keys() <= {*work.terms}, unit_costs.keys() - {*work.terms}
    num_terms, num_caches = len(work.terms), 1
    log_costs = [math.log(max(unit_costs.get(term, 0.0), _NO_COST_MS)) for term in work.terms]
    return CostNet(
        weights=(np.zeros((len(PROFILE), num_terms)),),
        biases=(np.array(log_costs),),
        cache_gain=np.zeros((num_terms, num_caches)),
        cache_mb=np.zeros(num_caches),
        cache_slope=np.ones(num_caches),
        launch_ms=num_kernels * KERNEL_MS,
        next_launch_ms=num_kernels * KERNEL_MS,
    )


def _cached(
    work: DeviceWork, data: str, near_ms: float, beyond_ms: float, l2_mb: float
) -> dict[str, float]:
    """Return the costs of lines from the L2 cache, and what lines from beyond it add.

    The latter is split between the terms of the two sizes nearest to the cache's.
    """
    names = [f"id_lines_of_{data}_beyond_{size:g}_mb" for size in work.cache_mb]
    added_ms = beyond_ms * _between(work.cache_mb, l2_mb)
    return {"id_lines": near_ms, **dict(zip(names, added_ms.tolist(), strict=True))}


def _between(sizes: tuple[float, ...], size: float) -> Floats:
    """Return the weights of sizes that interpolate `size`; at most two neighbors are not 0."""
    position = float(np.interp(math.log(size), np.log(sizes), np.arange(len(sizes))))
    return np.maximum(1.0 - np.abs(np.arange(len(sizes)) - position), 0.0)
