"""The inputs of cost models: work and access profiles of the shards of a workload.

Letters: S shards, K terms of a lookup's work, C numbers of a shard's access profile, W ranks,
G sizes of thread groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.workload import FLOAT_BYTES, USES_OF_BIN, Floats, Indices, Workload
from dlrm_sharded.plans.tables import MAX_SHARD_COLUMNS

WARP_COLUMNS = 128
"""Number of fp32 columns that the 32 threads of a warp handle at once, 4 by each thread."""

GROUP_COLUMNS = np.array(
    [32, 64, *range(WARP_COLUMNS, MAX_SHARD_COLUMNS["cuda"] + 1, WARP_COLUMNS)]
)
"""[G], widest rows that FBGEMM's CUDA kernels handle by a group of 1/4, 1/2, 1, 2, ... warps
(DISPATCH_OPTIMAL_KERNEL in its sources)."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The parts of a lookup's work that one type of device has.

    Args:
        cache_mb: thresholds between the sizes of its caches; data larger than a threshold comes
            from the next cache.
        has_warps: whether groups of threads handle the columns of a row together. Then all shards
            of a rank have groups as large as its widest shard needs, see `cost.widest`.
    """

    cache_mb: tuple[float, ...]
    has_warps: bool = False

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the parts; none falls when columns, ids or shards are added.

        Rows that a step uses again come from the cache that holds all the rows that it uses; on a
        GPU, a table with few samples has only part of the cache, see `CONCURRENT_SAMPLES`. The
        backward pass reads each id's gradient from a matrix [batch, columns].
        """
        return (
            "shards",
            "bags",
            "pooled_columns",
            "ids",
            "id_sort_passes",
            "id_lines",
            "id_columns",
            *(f"id_lines_of_rows_beyond_{size:g}_mb" for size in self.cache_mb),
            *(f"id_lines_of_gradients_beyond_{size:g}_mb" for size in self.cache_mb),
            "unique_ids",
            "unique_lines",
            "unique_columns",
            *(["id_warps"] if self.has_warps else []),
        )


DEVICE_WORK = {
    "cpu": DeviceWork(cache_mb=(0.25, 2.0, 16.0, 128.0)),
    "cuda": DeviceWork(cache_mb=(0.25, 2.0, 16.0, 50.0, 128.0), has_warps=True),
}
CPU_WORK = DEVICE_WORK["cpu"]

PROFILE = ("log_rows", "log_reuse", *(f"accesses_reused_{name}" for name in ("little", "often")))
"""Numbers that describe how well a shard's accesses fit caches; its unit costs depend on them."""

LITTLE_REUSE, OFTEN_REUSE = slice(1, 4), slice(7, None)
"""Reuse bins of rows that a step uses 2 to 8 times, and of those that it uses over 64 times."""

SORT_BITS = 8
"""Bits of a row's number that one pass of FBGEMM's radix sort handles."""

CONCURRENT_SAMPLES = 8192
"""Samples of tables that a GPU looks up at once: a warp each, 64 of them on every multiprocessor
(80 on a V100, 132 on an H100, 148 on a B200).

With fewer samples in a batch, several tables are looked up at once and share the L2 cache."""

LINE_COLUMNS = 16
"""Number of fp32 columns in a cache line of 64 B."""

SINGLE_LINES, STREAMED = 16, 0.6
"""Number of a row's lines that a CPU fetches from beyond a cache, or writes to a pooled vector, one
by one, and the relative time of each further line, because long rows are prefetched and streamed.

Measured on an Intel Xeon with AVX-512 on shards of up to 2,048 columns (docs/notes/cost_model.md).
Rows of 256 columns have 16 lines, and older models were fitted to no wider ones.
"""

EXTENT = (
    "rows of a shard",
    "columns of a shard",
    "ids per sample of a shard",
    "shards on a rank",
    "ids per rank",
    "batch size",
    "ranks",
)
"""Quantities whose fitted range a model knows; outside of it, it extrapolates."""


def work_of(workload: Workload, device: DeviceWork = CPU_WORK) -> Floats:
    """Return [S, K], the `terms` of a device for every shard, in thousands."""
    cols, ids, unique = workload.num_cols, workload.num_ids, workload.num_unique
    # A row is fetched in whole cache lines, however few of a line's columns it has. On a GPU
    # rows in fp16 have half as many; CPUs have measured factors, see `compute.CPU_HALF`.
    row_cols = cols if not device.has_warps else cols * workload.weight_bytes() / FLOAT_BYTES
    lines = np.ceil(row_cols / LINE_COLUMNS)
    pooled_lines, far_lines = cols / LINE_COLUMNS, lines
    if not device.has_warps:
        pooled_lines, far_lines = _streamed(pooled_lines), _streamed(far_lines)
    # Every sample has a bag in every table, even if the bag is empty. A sequence is looked up as if
    # each of its ids were a bag, except that a GPU's warp handles all ids of a sample.
    vectors = workload.num_vectors
    bags = workload.num_bags if device.has_warps else vectors
    # the backward pass sorts ids by row, a few bits of the row's number at a time
    passes = np.ceil(np.log2(np.maximum(workload.num_rows, 2.0)) / SORT_BITS)
    gradient_bytes = vectors * cols * FLOAT_BYTES
    # tables that are looked up at the same time share a GPU's cache
    share: Floats | float = 1.0
    if device.has_warps:  # a sequence may have no ids at all
        share = np.minimum(np.maximum(bags, 1.0) / CONCURRENT_SAMPLES, 1.0)
    terms = [
        np.full_like(cols, 1e3),  # one each: all terms are divided by 1e3 below
        bags,
        vectors * pooled_lines,
        ids,
        ids * passes,
        ids * lines,
        ids * row_cols / LINE_COLUMNS,
        *(
            ids * far_lines * _beyond(workload.unique_bytes(), size * share)
            for size in device.cache_mb
        ),
        *(ids * far_lines * _beyond(gradient_bytes, size) for size in device.cache_mb),
        unique,
        unique * lines,
        unique * row_cols / LINE_COLUMNS,
    ]
    if device.has_warps:
        terms.append(ids * GROUP_COLUMNS[thread_groups(workload)] / WARP_COLUMNS)
    return np.stack(terms, axis=1) / 1e3


def profile_of(workload: Workload) -> Floats:
    """Return [S, C], the `PROFILE` of every shard."""
    # the histogram counts rows; often used rows have a larger share of the accesses
    accesses = workload.reuse_histogram * USES_OF_BIN
    shares = accesses / np.maximum(accesses.sum(axis=1, keepdims=True), 1e-9)
    return np.column_stack(
        [
            np.log10(workload.num_rows),
            np.log10(workload.uses()),
            shares[:, LITTLE_REUSE].sum(axis=1),
            shares[:, OFTEN_REUSE].sum(axis=1),
        ]
    )


def extent_of(workload: Workload) -> Floats:
    """Return [E, 2], lowest and highest value of each of `EXTENT`."""
    counts = np.bincount(workload.rank, minlength=workload.world_size)
    used = counts > 0
    values = (
        workload.num_rows,
        workload.num_cols,
        workload.num_ids / np.maximum(workload.num_vectors, 1.0),
        counts[used],
        workload.by_rank(workload.num_ids)[used],
        workload.batch_size,
        workload.world_size,
    )
    return np.array([(np.min(value), np.max(value)) for value in values])


def thread_groups(workload: Workload) -> Indices:
    """Return [S], indices in `GROUP_COLUMNS` of the smallest thread groups for shards' columns."""
    groups: Indices = np.searchsorted(GROUP_COLUMNS, workload.num_cols)
    # No valid plan for GPUs has wider shards.
    return np.minimum(groups, len(GROUP_COLUMNS) - 1)


def _streamed(lines: Floats) -> Floats:
    """Return [S], the number of single lines that take as long as the lines of a row."""
    streamed: Floats = lines - (1.0 - STREAMED) * np.maximum(lines - SINGLE_LINES, 0.0)
    return streamed


def _beyond(num_bytes: Floats, cache_mb: Floats | float) -> Floats:
    """Return [S], share of the read bytes that a cache does not hold: 1/2 at the cache's size."""
    return num_bytes / (num_bytes + cache_mb * 1e6)
