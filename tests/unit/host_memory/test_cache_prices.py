"""Prices of cached tables against public measurements of FBGEMM's cache."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.host_memory.cache_prices import CachePrices
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import GIB, Topology
from tests.unit.cost.public_lookups import HELD_OUT, PublicLookup

H100 = next(lookup for lookup in HELD_OUT if lookup.source == "recsys-examples, cached")
"""10 tables of 26.8 M rows, 104,857 ids each, 43,372 of them different, 128 columns."""

A100 = dataclasses.replace(
    H100,
    gpu=gpu_specs()["a100_sxm_80gb"],
    num_tables=32,
    num_rows=1e5,
    ids=10_240,
    unique_ids=225_379 / 32,
)
"""FBGEMM, commit 8b9eae95: all of 225,379 different rows are exchanged, on a GPU with PCIe 4.0."""


def added_ms(lookup: PublicLookup, miss_ratio: float, state_bytes: int = 0) -> float:
    """Return what caching adds; all tables share one lookup, as in the public benchmarks."""
    topology = Topology(1, 80 * GIB, bytes_per_element=4 + state_bytes)
    prices = CachePrices.of(topology, Standing("prior", lookup.gpu.device_name))
    workload = lookup._workload()
    shards_ms = prices.added_ms(workload, np.full(lookup.num_tables, miss_ratio))
    return float(shards_ms.sum()) - (lookup.num_tables - 1) * prices.shard_ms


@pytest.mark.parametrize(
    ("lookup", "miss_ratio", "measured_ms"),
    [
        # recsys-examples: forward with a cache less forward without; the misses are simulated
        pytest.param(H100, 0.193, 3.36 - 0.36, id="h100-all_touched_rows"),
        pytest.param(H100, 0.356, 3.99 - 0.36, id="h100-four_fifths_of_them"),
        pytest.param(A100, 1.0, 7.05, id="prefetch-fp32"),
        pytest.param(dataclasses.replace(A100, embedding_dim=32), 1.0, 2.139, id="prefetch-fp8"),
    ],
)
def test_misses_and_handling_meet_public_times(
    lookup: PublicLookup, miss_ratio: float, measured_ms: float
) -> None:
    assert added_ms(lookup, miss_ratio) == pytest.approx(measured_ms, rel=0.15)


def test_adams_state_in_host_memory_meets_the_public_time() -> None:
    """The backward pass takes 11.01 ms with Adam and 0.79 with SGD."""
    added = added_ms(H100, 0.0, state_bytes=8) - added_ms(H100, 0.0)
    assert added == pytest.approx(11.01 - 0.79, rel=0.15)


def test_handling_follows_the_multiprocessors_and_not_the_memory() -> None:
    topology = Topology(1, 80 * GIB)
    h100, h200, l4 = (
        CachePrices.of(topology, Standing("prior", gpu_specs()[key].device_name))
        for key in ("h100_sxm", "h200_sxm", "l4")
    )
    assert h100.id_ms == h200.id_ms < l4.id_ms < 2.5 * h100.id_ms
