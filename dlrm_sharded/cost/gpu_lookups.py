"""Lookups on GPUs that nobody calibrated: a roofline of memory, L2 cache and launches.

Every price is a number of bytes over the GPU's nominal memory bandwidth, or a time on an H100 that
scales with it. docs/notes/hardware_priors.md says how well these few figures meet the public
measurements from which they were chosen:

- `ACCESS_SHARE`: rows are gathered, and written back, at this part of the nominal bandwidth. It is
  a compromise between FBGEMM's forward at 128 columns (2.05 TB/s), at 1,024 columns (1.5 TB/s) and
  under a production load (65 % of the peak), and what Adam takes longer than SGD (1.83 TB/s).
- `L2_SPEEDUP`: what is in the L2 cache comes so many times as fast. Measured are 1.6 (A100), 2.9
  (P100) and 3.5 (V100) (github.com/owensgroup/ml_perf_model).
- `STREAM_SHARE`: pooled vectors are written at the bandwidth that aiconfigurator calls usable.
- `ID_MS`, `WARP_MS`: the forward of 4 to 32 columns takes the same time, 22 G lookups/s; a fit to
  all widths gives a part of that to the ids and a part to the warps that handle a row.
- `BACKWARD_ID_MS`, `SORT_PASS_MS`: the rest of the backward, less gradients and updates: 2.1e-4 ms
  per 1,000 ids with SGD on unpooled vectors of an H100, and 5 to 9e-4 ms under Meta's loads.
- `KERNEL_MS`: aiconfigurator's time of a launch, times the number of kernels of a lookup.
"""

from __future__ import annotations

import math

import numpy as np

from dlrm_sharded.cost.compute import ComputeModel, DensePrices, PriceNet
from dlrm_sharded.cost.features import DEVICE_WORK, LINE_COLUMNS, PROFILE, DeviceWork
from dlrm_sharded.cost.workload import FLOAT_BYTES, Floats
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec

ACCESS_SHARE, STREAM_SHARE, L2_SPEEDUP = 0.6, 0.8, 3.0
REFERENCE_GB_PER_S = 3350.0
"""Memory bandwidth of the H100, to whose times the following figures belong."""

ID_MS, WARP_MS = 4.0e-5, 1.9e-5
"""Forward time of 1,000 ids, and of 1,000 warps that handle a row, in ms."""

BACKWARD_ID_MS, SORT_PASS_MS = 2.0e-4, 5e-5
"""Backward time of 1,000 ids, and of 1,000 ids in one pass of the sort, in ms."""

KERNEL_MS = 0.003
NUM_KERNELS = (3, 15)
"""Kernels of a lookup's forward and backward pass."""

LOOKUP_ERROR = 0.5
"""Relative error of lookups that is expected.

The public figures from which the prices were chosen are met within 31 %; the rest is for what
scaling by the memory bandwidth misses on other GPUs, of which there are no figures."""

DENSE_PASSES = 10
"""Times that the gradients or weights of a replica go through memory in a step: cleared (1), added
to (1), copied to the all-reduce and divided there (4), read with the weights and the optimizer's
state to update these (4)."""

DEFAULT_OPTIMIZER = "rowwise_adagrad"
UPDATE_LINES = {"sgd": (2.0, 0.0), "rowwise_adagrad": (2.0, 1.0), "adam": (6.0, 0.0)}
"""Cache lines that an update reads and writes for each line of a row, and for each row."""

_LINE_BYTES = FLOAT_BYTES * LINE_COLUMNS
_NO_PRICE_MS = 1e-12
_MAX_PROFILE = 20.0


def gpu_compute(spec: GpuSpec, optimizer: str | None) -> ComputeModel:
    """Return the computation of lookups on a GPU, with a fused optimizer of the tables."""
    work = DEVICE_WORK["cuda"]
    slower = REFERENCE_GB_PER_S / spec.memory_gb_per_s
    line_ms = _LINE_BYTES * 1e3 / (ACCESS_SHARE * spec.memory_gb_per_s * 1e6)
    stream_ms = _LINE_BYTES * 1e3 / (STREAM_SHARE * spec.memory_gb_per_s * 1e6)
    update_lines, row_lines = UPDATE_LINES[optimizer or DEFAULT_OPTIMIZER]
    forward = {
        "pooled_columns": stream_ms,
        "ids": ID_MS * slower,
        **_cached(work, "id_lines", "rows", line_ms, spec.l2_mb),
    }
    backward = {
        "ids": BACKWARD_ID_MS * slower,
        "id_sort_passes": SORT_PASS_MS * slower,
        **_cached(work, "id_lines", "gradients", line_ms, spec.l2_mb),
        "unique_ids": row_lines * line_ms,
        "unique_lines": update_lines * line_ms,
    }
    num_profile = len(PROFILE)
    return ComputeModel(
        profile_mean=np.zeros(num_profile),
        profile_std=np.ones(num_profile),
        profile_low=np.zeros(num_profile),
        profile_high=np.full(num_profile, _MAX_PROFILE),
        forward=_constant_prices(work, forward, NUM_KERNELS[0]),
        backward=_constant_prices(work, backward, NUM_KERNELS[1]),
        device=work,
        # groups of threads as large as the widest shard needs hold up the ids of all shards
        widest_ms=np.full((2, 2), WARP_MS * slower),
        dense=DensePrices(mb_ms=DENSE_PASSES / (STREAM_SHARE * spec.memory_gb_per_s)),
    )


def _constant_prices(work: DeviceWork, prices: dict[str, float], num_kernels: int) -> PriceNet:
    """Return a net whose prices depend on no profile and on no cache but those of its terms.

    Args:
        prices: ms per 1,000, by names of `DeviceWork.terms`; other terms cost next to nothing.
    """
    assert prices.keys() <= {*work.terms}, prices.keys() - {*work.terms}
    num_terms, num_caches = len(work.terms), 1
    log_prices = [math.log(max(prices.get(term, 0.0), _NO_PRICE_MS)) for term in work.terms]
    return PriceNet(
        weights=(np.zeros((len(PROFILE), num_terms)),),
        biases=(np.array(log_prices),),
        cache_gain=np.zeros((num_terms, num_caches)),
        cache_mb=np.zeros(num_caches),
        cache_slope=np.ones(num_caches),
        launch_ms=num_kernels * KERNEL_MS,
        next_launch_ms=num_kernels * KERNEL_MS,
    )


def _cached(
    work: DeviceWork, term: str, data: str, line_ms: float, l2_mb: float
) -> dict[str, float]:
    """Return the prices of lines from the L2 cache, and of those beyond it.

    FBGEMM goes through the tables one after another, so each has nearly all of the cache. The
    price beyond the cache is shared among the terms of the sizes next to the cache's.
    """
    beyond_ms = line_ms * (1.0 - 1.0 / L2_SPEEDUP)
    shares = _between(work.cache_mb, l2_mb)
    return {
        term: line_ms / L2_SPEEDUP,
        **{
            f"{term}_of_{data}_beyond_{size:g}_mb": share * beyond_ms
            for size, share in zip(work.cache_mb, shares.tolist(), strict=True)
        },
    }


def _between(sizes: tuple[float, ...], size: float) -> Floats:
    """Return the weights of sizes; at most two next to each other are not 0."""
    position = float(np.interp(math.log(size), np.log(sizes), np.arange(len(sizes))))
    return np.maximum(1.0 - np.abs(np.arange(len(sizes)) - position), 0.0)
