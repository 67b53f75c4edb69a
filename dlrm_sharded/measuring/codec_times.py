"""Measures what ranks take to convert the numbers of an exchange to another precision and back."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.cost.codecs import CodecTimes
from dlrm_sharded.measuring.stage_clock import StageClock, max_over_ranks
from dlrm_sharded.model.sharded_model import exchange_codecs
from dlrm_sharded.plans.plan_cost import DIRECTIONS
from dlrm_sharded.plans.precision import (
    DEVICE_PRECISIONS,
    EXCHANGE_BYTES,
    QUANTIZED_ROW,
    ExchangePrecision,
)

ITERATIONS, WARMUP = 7, 2
MEGABYTES = {"cpu": 8, "cuda": 64}
"""Size of what is converted: about the vectors of a rank."""

ADDED_UP = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Precisions of reductions besides fp32."""


def measure_codecs(
    device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, CodecTimes]:
    """Return the times of every precision that the device has; all ranks of the group call it.

    All ranks convert at the same time, as they do in training, and the slowest one counts.
    """
    count = MEGABYTES[device.type] * 1_000_000 // 4
    world_size = dist.get_world_size(group)
    count -= count % (QUANTIZED_ROW * world_size)
    numbers = torch.randn(count, device=device)
    megabytes = count * 4 / 1e6

    def timed(work: Callable[[], object]) -> float:
        """Return the time in ms per MB."""
        return _median_ms(work, device, group) / megabytes

    exact_reduce_ms = timed(partial(_reduce, numbers, group))
    found = {}
    for precision in DEVICE_PRECISIONS[device.type]:
        if precision == "fp32":
            continue
        times = _converting(precision, numbers, timed)
        if (dtype := ADDED_UP.get(precision)) is not None:
            rounded = numbers.to(dtype)
            share = EXCHANGE_BYTES[precision] / EXCHANGE_BYTES["fp32"]
            more_ms = timed(partial(_reduce, rounded, group)) - share * exact_reduce_ms
            times = dataclasses.replace(times, reduce=max(more_ms, 0.0))
        found[precision] = times
    return found


def _converting(precision: str, numbers: Tensor, timed: Callable[..., float]) -> CodecTimes:
    codecs = exchange_codecs(ExchangePrecision(precision, precision))
    assert codecs is not None
    of_all_to_all = codecs["POOLED_EMBEDDINGS_ALL_TO_ALL"]
    times = {}
    for direction in DIRECTIONS:
        codec = getattr(of_all_to_all, direction)
        context = codec.create_context()
        encoded = codec.encode(numbers, context)
        times[f"{direction}_encode"] = timed(partial(codec.encode, numbers, context))
        times[f"{direction}_decode"] = timed(partial(codec.decode, encoded, context))
    return CodecTimes(**times)


def _reduce(numbers: Tensor, group: dist.ProcessGroup | None) -> None:
    share = torch.empty_like(numbers[: len(numbers) // dist.get_world_size(group)])
    dist.reduce_scatter_tensor(share, numbers, group=group)


def _median_ms(
    work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Return the median time of a function on the slowest rank, without its launch on a GPU."""
    clock = StageClock(device, group)
    times_ms = []
    for _ in range(WARMUP + ITERATIONS):
        clock.timed("conversion", work)
        times_ms.append(clock.finish_iteration().times_ms["conversion"])
    return max_over_ranks(statistics.median(times_ms[WARMUP:]), device, group)
