"""Prices tables whose rows a GPU caches in part: misses, updates in host memory, handling.

FBGEMM fetches the rows that a batch misses before it looks them up, and writes back the rows in
whose place they come, as training has changed all rows that it read. Nothing else runs meanwhile,
so this time adds to the forward pass. Nobody has measured it with this package; the figures meet
the public ones within 13 % (docs/reference/cached_tables.md):

- `LINK_SHARE`: rows come in while others go out, and state is read while other state is written, so
  the bytes of both directions together pass faster than the nominal bandwidth of one. An H100
  reaches 1.8 times that bandwidth with rows and 1.4 times with Adam's state
  (NVIDIA/recsys-examples, benchmark_results.json), and a GPU that is not named, on PCIe 4.0 by its
  times, 1.1 times (FBGEMM, commit 8b9eae95).
- `HANDLING_CYCLES`: each id is numbered, sorted and looked up in the cache. What these sources
  leave for it is 2.1 ns an id on the H100, and 1.4 ns on the other GPU.
- `HOST_GB_PER_S`: what the memory of one host is taken to give to all its GPUs, about two thirds of
  the nominal bandwidth of two sockets (DGX A100 410 GB/s, DGX H100 614).

Letters: S shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.gpu_lookups import KERNEL_MS, NUM_KERNELS, cycles_ms
from dlrm_sharded.cost.workload import Floats, Workload, workload_of_plan
from dlrm_sharded.hardware.gpus.gpu_specs import GENERIC, find_gpu_spec, gpu_specs
from dlrm_sharded.host_memory.miss_ratio import curve_of
from dlrm_sharded.plans.cached_memory import WEIGHT_BYTES
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import CachedTable, CacheForecast
from dlrm_sharded.plans.standing import Standing
from dlrm_sharded.plans.task import ShardingTask, Topology

LINK_SHARE = 1.4
"""Bandwidth of both directions together, between GPU and host memory, relative to the nominal one
of one direction."""

HANDLING_CYCLES = 420.0
"""Cycles of a multiprocessor for an id of a cached table, beside the lookup."""

HOST_GB_PER_S = 300.0

NUM_CACHE_KERNELS = 12
"""Kernels that find and fetch what is missing, besides those of the lookup."""


@dataclass(frozen=True, slots=True)
class CachePrices:
    """Prices of cached tables on one kind of rank.

    Args:
        byte_ms: a byte of a row that is fetched or written back, or of optimizer state that is read
            or written in host memory.
        id_ms: an id of a cached table, hit or miss.
        shard_ms: launches for a cached shard, which has a lookup module to itself.
        state_bytes_per_element: optimizer state of one weight in host memory.
    """

    byte_ms: float
    id_ms: float
    shard_ms: float
    state_bytes_per_element: int

    @classmethod
    def of(cls, topology: Topology, standing: Standing | None) -> CachePrices:
        """Return the prices of the GPU whose prices a cost model has; an H100's if it has none."""
        found = None if standing is None else find_gpu_spec(standing.hardware)
        spec = found or gpu_specs()[GENERIC]
        if topology.host_bytes_per_s is not None:
            rate = topology.host_bytes_per_s
        else:
            host_rate = max(HOST_GB_PER_S / topology.ranks_per_host, 1e-3) * 1e9
            rate = min(LINK_SHARE * spec.host_gb_per_s * 1e9, host_rate)
        return cls(
            byte_ms=1e3 / rate,
            id_ms=cycles_ms(spec, HANDLING_CYCLES) / 1e3,
            shard_ms=(sum(NUM_KERNELS) + NUM_CACHE_KERNELS) * KERNEL_MS,
            state_bytes_per_element=topology.bytes_per_element - WEIGHT_BYTES,
        )

    def added_ms(self, workload: Workload, miss_ratio: Floats) -> Floats:
        """Return [S], what caching adds to the forward pass of shards.

        Args:
            miss_ratio: [S], of the shards' unique ids.
        """
        elements = workload.num_unique * workload.num_cols
        # a row comes in for each that goes out
        rows_ms = 2.0 * elements * WEIGHT_BYTES * miss_ratio * self.byte_ms
        # every update reads and writes the state of its row, in the cache or not
        state_ms = 2.0 * elements * self.state_bytes_per_element * self.byte_ms
        return rows_ms + state_ms + workload.num_ids * self.id_ms + self.shard_ms


def cache_forecast(
    plan: ShardingPlan, task: ShardingTask, standing: Standing | None
) -> CacheForecast | None:
    """Predict what the cached tables of a valid plan add; None if the plan has none."""
    load_factors = plan.load_factors
    if not load_factors:
        return None
    miss_ratio = miss_ratios(task, load_factors)
    workload = workload_of_plan(plan, task)
    is_cached = np.array([shard.table in load_factors for shard in plan.shards])
    by_shard = np.array([miss_ratio.get(shard.table, 0.0) for shard in plan.shards])
    added_ms = CachePrices.of(task.topology, standing).added_ms(workload, by_shard) * is_cached
    shard_ms: dict[str, float] = {}
    for shard, ms in zip(plan.shards, added_ms.tolist(), strict=True):
        shard_ms[shard.table] = max(shard_ms.get(shard.table, 0.0), ms)
    measured = {table.name for table in task.tables if table.miss_ratio_curve is not None}
    return CacheForecast(
        tables=tuple(
            CachedTable(name, load_factor, miss_ratio[name], name in measured, shard_ms[name])
            for name, load_factor in load_factors.items()
        ),
        added_ms_by_rank=tuple(workload.by_rank(added_ms).tolist()),
        host_bytes_by_rank=tuple(plan.host_bytes_by_rank(task.topology)),
    )


def miss_ratios(task: ShardingTask, load_factors: Mapping[str, float]) -> dict[str, float]:
    """Return the miss ratios of tables, by their curves, at their load factors."""
    return {
        table.name: curve_of(table, task.batch_size).ratio(load_factors[table.name])
        for table in task.tables
        if table.name in load_factors
    }
