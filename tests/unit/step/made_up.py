"""Times of a made-up dense part."""

from typing import Any

from dlrm_sharded.step.parts import DenseTimes


def dense_times(**more: Any) -> DenseTimes:
    """Return times of 1 to 8 ms, and others as they are given."""
    return DenseTimes(
        data_ms=1.0,
        bottom_forward_ms=2.0,
        top_forward_ms=4.0,
        top_backward_ms=8.0,
        bottom_backward_ms=3.0,
        **more,
    )
