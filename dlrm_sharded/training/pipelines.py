"""The training pipelines: what they do of a step during the step before, and what they hold.

TorchRec has all of them; `pipeline.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Says which work of a step a pipeline does during the step before.

    Args:
        next_lookup: phase of the step before, ahead of which the vectors are looked up; None for a
            lookup in the step itself.
        is_exact: whether it trains as `base` does, up to the order of sums.
        num_batches: largest number of batches that a device holds at a time.
        num_arrived: number of these batches whose redistributed ids the device also holds.
    """

    next_lookup: Literal["backward", "optimizer"] | None = None
    is_exact: bool = True
    num_batches: int = 2
    num_arrived: int = 1


PIPELINES = {
    "base": Pipeline(),
    "sparse_dist": Pipeline(num_batches=3, num_arrived=2),
    "sparse_dist_lite": Pipeline(),
    "fused_sparse_dist": Pipeline(next_lookup="optimizer", num_batches=3, num_arrived=2),
    "semi_sync": Pipeline(next_lookup="backward", is_exact=False, num_batches=3, num_arrived=3),
}
"""The pipelines by name."""
