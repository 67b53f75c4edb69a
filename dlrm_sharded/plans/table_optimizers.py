"""Fused optimizers of tables: the memory of their state, and where they train."""

from __future__ import annotations

from dlrm_sharded.plans.precision import TABLE_BYTES

STATE_BYTES = {
    "sgd": (0, 0),
    "rowwise_adagrad": (0, 4),
    "elementwise_adagrad": (4, 0),
    "adam": (8, 0),
}
"""Fused optimizers of tables, with their state in bytes per weight and per row of a shard."""

CAN_REPLICATE = ("sgd", "rowwise_adagrad", "elementwise_adagrad")
"""Optimizers of tables that do not change a row whose gradient is zero.

A replica has a dense gradient, in which the rows that no sample has looked up are all zeros.
"""

CUDA_ONLY = ("adam",)
"""Optimizers of tables that FBGEMM does not fuse on CPUs."""


def memory_of(optimizer: str) -> tuple[int, int]:
    """Return the bytes of an fp32 weight with its state, and the state's bytes per shard row."""
    per_element, per_row = STATE_BYTES[optimizer]
    return TABLE_BYTES["fp32"] + per_element, per_row


def why_not_fused(optimizer: str, compute_device: str) -> str | None:
    """Return why FBGEMM cannot fuse an optimizer of tables on a device; None if it can."""
    if optimizer not in CUDA_ONLY or compute_device == "cuda":
        return None
    others = " or ".join(name for name in STATE_BYTES if name not in CUDA_ONLY)
    return f"{optimizer!r}, which FBGEMM fuses on CUDA only; use {others} on a CPU"


def why_not_replicated(optimizer: str) -> str | None:
    """Return why no table can be replicated under an optimizer of tables; None if it can."""
    if optimizer in CAN_REPLICATE:
        return None
    return (
        f"{optimizer!r}, under which no table can be replicated: it would also change the rows of "
        f"a replica that no sample looks up; use {' or '.join(CAN_REPLICATE)}, or a plan without "
        "replicas"
    )
