"""Deduplicated ids of sequences: each rank sends every id of its own samples once.

TorchRec's `EmbeddingCollectionSharder(use_index_dedup=True)` sorts the ids of a rank's samples,
table by table, before it exchanges them. Ranks look up and return one vector for each id that is
left, and a gather repeats the vectors where their ids stood. Gradients take the way back. So a
table has fewer ids, each of them used by fewer ranks than by samples, and its ranks pay for the
sort and for the gather.

A table is profiled over the global batch. Of the u uses of an id, each falls into the samples of
one rank with the probability 1 / W, so that W (1 - (1 - 1/W)^u) ranks are expected to use it.
Samples that repeat their own ids leave fewer: the histogram does not tell.

Letters: W ranks, S shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.gpu_lookups import KERNEL_MS, SORT_CYCLES, STREAM_SHARE, cycles_ms
from dlrm_sharded.cost.workload import USES_OF_BIN, Floats, Workload, workload_of_tables
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec
from dlrm_sharded.plans.task import ShardingTask

SORT_BITS = 8
"""Bits of an id that one pass of a sort handles."""

NUM_KERNELS = 10
"""Kernels of `jagged_unique_indices`, those of the sort and of the scans included."""

GATHER_PASSES = (2, 3)
"""Times that the repeated vectors go through memory: read and written forward; backward, their
gradients are read and added to those of the vectors, which are read and written."""


@dataclass(frozen=True, slots=True)
class DedupPrices:
    """Prices of deduplication on a rank, in addition to lookups and exchanges.

    Args:
        launch_ms: time of each sort, whatever its size.
        pass_ms: time of a million ids in one pass of a sort.
        forward_mb_ms, backward_mb_ms: time of a MB of repeated vectors, and of their gradients.
    """

    launch_ms: float
    pass_ms: float
    forward_mb_ms: float
    backward_mb_ms: float

    def added_ms(self, workload: Workload) -> tuple[float, float, float]:
        """Return the times of the sort, of the gather, and of its backward pass on every rank.

        TorchRec sorts the ids of a table in column shards once for each of these, and a module has
        a sort for each kind of layout.
        """
        if workload.repeats is None:
            return 0.0, 0.0, 0.0
        is_sorted = workload.repeats > 0
        num_ids = workload.num_ids * workload.repeats / workload.world_size
        rows = max(float(workload.num_rows[is_sorted].sum()), 2.0)
        num_passes = math.ceil(math.log2(rows) / SORT_BITS)
        num_sorts = len(np.unique(workload.module[is_sorted]))
        mb = float((num_ids * workload.num_cols * 4).sum()) / 1e6
        return (
            num_sorts * self.launch_ms + float(num_ids.sum()) / 1e6 * num_passes * self.pass_ms,
            mb * self.forward_mb_ms,
            mb * self.backward_mb_ms,
        )


def gpu_dedup_prices(spec: GpuSpec) -> DedupPrices:
    """Return what the sort and the gather take on a GPU by its data sheet; nobody measured them.

    FBGEMM sorts pairs of as many bytes as in the backward pass of a lookup (`SORT_CYCLES`).
    """
    forward, backward = (passes / (STREAM_SHARE * spec.memory_gb_per_s) for passes in GATHER_PASSES)
    return DedupPrices(
        launch_ms=NUM_KERNELS * KERNEL_MS,
        pass_ms=1e3 * cycles_ms(spec, SORT_CYCLES),
        forward_mb_ms=forward,
        backward_mb_ms=backward,
    )


def sequence_modules(task: ShardingTask) -> tuple[str, ...]:
    """Return the paths of the modules whose ids can be deduplicated, sorted."""
    return tuple(sorted({table.module for table in task.tables if not table.pooled}))


def deduplicated(task: ShardingTask, modules: Collection[str]) -> ShardingTask:
    """Return the task with the ids of these modules' sequences as the ranks exchange them.

    Tables without an access profile keep their ids. A task that is deduplicated stays as it is.
    """
    found = [
        table
        for table in task.tables
        if not table.pooled and table.module in modules and table.repeats is None
    ]
    if not found:
        return task
    world_size = task.topology.world_size
    num_ids = np.array([task.batch_size * table.pooling_factor for table in found])
    whole = workload_of_tables(found, task.batch_size)
    ranks_of_bin = world_size * (1 - (1 - 1 / world_size) ** USES_OF_BIN)
    uses = whole.reuse_histogram @ ranks_of_bin
    left = np.where(uses > 0, np.minimum(whole.num_unique * uses, num_ids), num_ids)
    histograms = whole.reuse_histogram @ _in_bins(ranks_of_bin)
    names = [table.name for table in found]
    known = {table.name for table in found if table.reuse_histogram is not None}
    by_name = dict(zip(names, map(tuple, histograms.tolist()), strict=True))
    repeats = num_ids / np.where(left > 0, left, 1.0)
    return task.with_values(
        pooling_factor=dict(zip(names, (left / task.batch_size).tolist(), strict=True)),
        reuse_histogram={name: by_name[name] for name in known},
        repeats=dict(zip(names, repeats.tolist(), strict=True)),
    )


def _in_bins(uses: Floats) -> Floats:
    """Return [17, 17], the shares of the two nearest bins that keep the mean of these uses [17]."""
    below = np.clip(np.searchsorted(USES_OF_BIN, uses, side="right") - 1, 0, len(USES_OF_BIN) - 2)
    share = np.clip(
        (uses - USES_OF_BIN[below]) / (USES_OF_BIN[below + 1] - USES_OF_BIN[below]), 0.0, 1.0
    )
    bins, shares = np.arange(len(uses)), np.zeros((len(uses), len(USES_OF_BIN)))
    shares[bins, below] = 1 - share
    shares[bins, below + 1] = share
    return shares
