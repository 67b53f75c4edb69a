"""Memory of tables in host memory whose rows a device caches in part (FBGEMM's UVM caching).

FBGEMM (`split_table_batched_embeddings_ops_training.py`, version 1.8) keeps on the device:
- the cached rows in fp32, in sets of 32, as many sets as hold `load_factor` of the rows
  (`lxu_cache_weights`), with a row number and a time of last use each (`lxu_cache_state`,
  `lxu_state`);
- the table of every row, 4 bytes each (`cache_index_table_map`);
- optimizer state by row, as of row-wise Adagrad, of all rows (`construct_split_state`).
All weights and the optimizer state of every element, as of Adam, are in host memory. That state is
not cached: each update reads and writes it there.
"""

from __future__ import annotations

from dlrm_sharded.plans.task import Topology

CACHE_WAYS = 32
"""Rows of a set; each row belongs to one set (DEFAULT_ASSOC of FBGEMM on CUDA)."""

WEIGHT_BYTES = 4
SLOT_BYTES = 16
"""Row number and time of last use of a cached row."""

INDEX_BYTES = 4
"""Number of its table, for every row in host memory."""


def num_slots(num_rows: int, load_factor: float) -> int:
    """Return the rows that a cache holds, a multiple of `CACHE_WAYS`."""
    return CACHE_WAYS * max(1, -(-int(num_rows * load_factor) // CACHE_WAYS))


def cached_weight_bytes(num_rows: int, num_cols: int, load_factor: float) -> int:
    """Return the memory on the device of the weights in a shard's cache."""
    return num_slots(num_rows, load_factor) * num_cols * WEIGHT_BYTES


def cached_shard_bytes(topology: Topology, num_rows: int, num_cols: int, load_factor: float) -> int:
    """Return the memory on the device of a shard if a part of its rows is cached there."""
    slots = num_slots(num_rows, load_factor) * SLOT_BYTES
    of_rows = num_rows * (INDEX_BYTES + topology.optimizer_bytes_per_row)
    return cached_weight_bytes(num_rows, num_cols, load_factor) + slots + of_rows


def host_shard_bytes(topology: Topology, num_rows: int, num_cols: int) -> int:
    """Return the host memory of such a shard: weights and optimizer state of every element."""
    return num_rows * num_cols * topology.bytes_per_element
