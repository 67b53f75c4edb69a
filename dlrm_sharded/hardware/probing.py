"""Measures the probe of a rank: its device alone, then the exchange between all ranks.

Each figure is the best of many short repeats, spread over the time of the probe: other work on the
machine slows most of them down, but hardly all.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlrm_sharded.hardware.probe import ExchangeProbe, Probe
from dlrm_sharded.hardware.torch_defaults import torch_defaults

ROWS = {"cpu": 2**20, "cuda": 2**22}
"""Rows of the table by type of device: 256 MiB and 1 GiB, beyond the caches of either."""

CACHED_ROWS = {"cpu": 2**10, "cuda": 2**14}
"""Rows of 256 KiB and 4 MiB, within the second-level cache of one core or of a GPU."""

IDS = {"cpu": 2**14, "cuda": 2**19}
"""Rows that one repeat reads."""

DIM = 64
POOLING = 16
NUM_BATCHES = 32
"""Batches of ids that repeats take in turn, so that no cache still has the rows of the last."""

ROUNDS, TURN_S = 16, 0.02
"""Each figure has this many turns of this length, so that no pause of the process hits all."""

Call = Callable[[], object]
LATENCY_REPEATS, EXCHANGE_REPEATS = 50, 16
EXCHANGE_BYTES = 2**22
"""Bytes that a rank sends in the large all-to-all."""


@torch_defaults()
def measure_probe(device: torch.device) -> Probe:
    """Measure the device of this process; it takes about a second.

    On a CPU, the threads are those that torch is set to.
    """
    kind = device.type
    load = max(os.getloadavg()[0], 1e-3)
    table = torch.full((ROWS[kind], DIM), 1.0, device=device)
    source, target = table.view(2, -1)
    pairs = list(zip(source.chunk(8), target.chunk(8), strict=True))
    copy_s, gather_s, cached_gather_s = _fastest_s(
        [
            [functools.partial(target.copy_, source) for source, target in pairs],
            _gathers(table),
            _gathers(table[: CACHED_ROWS[kind]]),
        ],
        device,
    )
    row_bytes = DIM * table.element_size()
    return Probe(
        copy_gb_per_s=2 * pairs[0][0].nbytes / copy_s / 1e9,
        gather_gb_per_s=IDS[kind] * row_bytes / gather_s / 1e9,
        cached_gather_gb_per_s=IDS[kind] * row_bytes / cached_gather_s / 1e9,
        load=load,
    )


@torch_defaults()
def measure_exchange(device: torch.device, *, ranks_per_host: int) -> ExchangeProbe:
    """Measure an all-to-all of the job's group; all ranks call it together."""
    num_ranks = dist.get_world_size()
    sent = torch.zeros(EXCHANGE_BYTES // 4 // num_ranks * num_ranks, device=device)
    received = torch.empty_like(sent)
    few, few_received = torch.zeros(2, num_ranks, device=device)

    def seconds(out: torch.Tensor, into: torch.Tensor, repeats: int) -> float:
        exchange = functools.partial(dist.all_to_all_single, into, out)
        return min([_timed_s(exchange, device) for _ in range(repeats + 1)][1:])

    latency_s = seconds(few, few_received, LATENCY_REPEATS)
    large_s = seconds(sent, received, EXCHANGE_REPEATS)
    return ExchangeProbe(
        num_ranks=num_ranks,
        ranks_per_host=ranks_per_host,
        latency_us=latency_s * 1e6,
        gb_per_s=sent.nbytes * (num_ranks - 1) / num_ranks / large_s / 1e9,
    )


def _gathers(table: torch.Tensor) -> list[Call]:
    """Return pooled lookups of random rows, each with the ids of one repeat."""
    num_ids = IDS[table.device.type]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(table), (NUM_BATCHES * num_ids,), generator=generator)
    offsets = torch.arange(0, num_ids, POOLING).to(table.device)
    return [
        functools.partial(F.embedding_bag, batch, table, offsets, mode="sum")
        for batch in ids.to(table.device).split(num_ids)
    ]


def _fastest_s(figures: Sequence[Sequence[Call]], device: torch.device) -> list[float]:
    """Return the shortest time of the calls of each figure, which take turns in rounds."""
    for calls in figures:
        calls[-1]()
    fastest = [math.inf] * len(figures)
    turns = [itertools.cycle(calls) for calls in figures]
    for _ in range(ROUNDS):
        for figure, turn in enumerate(turns):
            until = time.perf_counter() + TURN_S
            while time.perf_counter() < until:
                fastest[figure] = min(fastest[figure], _timed_s(next(turn), device))
    return fastest


def _timed_s(call: Callable[[], object], device: torch.device) -> float:
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if on_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
