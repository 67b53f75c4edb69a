"""The host memory of the copy from which a checkpoint of a GPU's model is written."""

from __future__ import annotations

from collections.abc import Iterable

from dlrm_sharded.checkpoint.logical import PART_BYTES
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.task import Topology

FLOAT_BYTES = 4
"""Bytes of a weight, as a topology counts them, and of one value of optimizer state."""


def pinned_bytes(num_bytes: int) -> int:
    """Return the page-locked memory that torch takes for a tensor: a power of two.

    The source is `CachingHostAllocator.h` of torch 2.13.
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def copied_bytes(shards: Iterable[Shard], topology: Topology, *, dense_bytes: int) -> int:
    """Return the page-locked memory of a rank's copy, tensor by tensor and block by block.

    Args:
        dense_bytes: weights, buffers and optimizer state of the dense part.
    """
    num_states = (topology.bytes_per_element - FLOAT_BYTES) // FLOAT_BYTES
    total = pinned_bytes(dense_bytes)
    for shard in shards:
        row_bytes = [
            shard.weight_bytes // shard.num_rows,
            *num_states * [FLOAT_BYTES * shard.num_cols],
            topology.optimizer_bytes_per_row,
        ]
        total += sum(_in_blocks(shard.num_rows, of_row) for of_row in row_bytes if of_row)
    return total


def _in_blocks(num_rows: int, row_bytes: int) -> int:
    """Return the memory of a tensor's copy in blocks of rows, as `Piece.blocks` divides it."""
    height = max(1, PART_BYTES // row_bytes)
    num_full, rest = divmod(num_rows, height)
    return num_full * pinned_bytes(height * row_bytes) + pinned_bytes(rest * row_bytes)
