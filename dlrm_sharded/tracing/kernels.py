"""Finds out what a GPU did at each moment, from the kernels on all of its streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dlrm_sharded.step.parts import ALL_REDUCE, DATA, DENSE_BACKWARD, OTHER
from dlrm_sharded.tracing.regions import Collective, Event, Segment, SegmentAt

EXCHANGE_KERNELS = ("nccl", "rccl")
"""Beginnings of the names of kernels that exchange data between ranks."""

_COMPUTES, _EXCHANGES, _COPIES, _IDLE = range(4)


def is_exchange(name: str) -> bool:
    """Return whether a kernel exchanges data between ranks."""
    return name.lower().startswith(EXCHANGE_KERNELS)


def kernel_segments(
    kernels: Iterable[Event], segment_at: Mapping[int, SegmentAt]
) -> list[tuple[Segment, Event]]:
    """Return the part, and the layer, of each kernel: those in which the host launched it."""
    found = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin_ms):
        around = None
        if kernel.launch is not None and kernel.launch[0] in segment_at:
            around = segment_at[kernel.launch[0]](kernel.launch[1])
        part, module = (around.part, around.module) if around else (OTHER, "")
        if is_exchange(kernel.name) and part == DENSE_BACKWARD:
            part = ALL_REDUCE  # DDP issues it in nodes of the backward pass
        segment = Segment(part, kernel.begin_ms, kernel.end_ms, kernel.name, module)
        found.append((segment, kernel))
    return found


def device_collectives(kernels: Iterable[tuple[Segment, Event]]) -> list[Collective]:
    """Return the exchanges: their kernels begin when the rank arrives, and wait for the others."""
    return [
        Collective(segment.part, segment.begin_ms, segment.end_ms)
        for segment, kernel in kernels
        if is_exchange(kernel.name)
    ]


def device_segments(
    kernels: Iterable[tuple[Segment, Event]], host: Sequence[Segment]
) -> list[Segment]:
    """Return what the device did at each moment.

    Computation hides exchanges beside it, and exchanges hide copies of the next batch. Where the
    device does nothing, it waits for the host: for the batch if the host reads one.

    Args:
        host: segments of the host's main thread.
    """
    layers: list[tuple[int, Segment]] = []
    for segment, kernel in kernels:
        rank = _COMPUTES
        if is_exchange(kernel.name):
            rank = _EXCHANGES
        elif segment.part == DATA:
            rank = _COPIES
        layers.append((rank, segment))
    layers += [
        (_IDLE, Segment(DATA if s.part == DATA else OTHER, s.begin_ms, s.end_ms)) for s in host
    ]
    return _topmost(layers)


def _topmost(layers: Sequence[tuple[int, Segment]]) -> list[Segment]:
    """Return the segment of the lowest rank at each moment; the first one of equal ranks."""
    changes = sorted(
        [(segment.begin_ms, True, place) for place, (_, segment) in enumerate(layers)]
        + [(segment.end_ms, False, place) for place, (_, segment) in enumerate(layers)]
    )
    under_way: set[int] = set()
    result: list[Segment] = []
    clock = float("-inf")
    for time_ms, begins, place in changes:
        if under_way and time_ms > clock:
            top = min(under_way, key=lambda i: (layers[i][0], layers[i][1].begin_ms, i))
            result.append(replace(layers[top][1], begin_ms=clock, end_ms=time_ms))
        clock = time_ms
        if begins:
            under_way.add(place)
        else:
            under_way.discard(place)
    return result


def device_steps(
    kernels: Iterable[tuple[Segment, Event]], host_steps: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return begin and end of each step but the first on the device.

    A step ends with the last computation that the host launched in it, and the next begins there.
    """
    ends = [float("-inf")] * len(host_steps)
    for _, kernel in kernels:
        if kernel.launch is None or is_exchange(kernel.name):
            continue
        for step, (begin_ms, end_ms) in enumerate(host_steps):
            if begin_ms <= kernel.launch[1] < end_ms:
                ends[step] = max(ends[step], kernel.end_ms)
    return list(itertools.pairwise(ends))
