"""The pipelines of a training: what of a step they do during the step before, and what that takes.

TorchRec has all of them; `training/pipeline.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.step.parts import OPTIMIZER

AUTO = "auto"
"""The name that stands for the default of the device, or what was measured to be faster there."""

TOP_BACKWARD = "top_backward"
"""Operation of a step with which its backward pass begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Says which work of a step a pipeline does during the step before.

    Args:
        next_ids: whether the ids are redistributed then.
        next_lookup: operation of the step before that follows the lookup of the vectors, which are
            exchanged from then on; None for a lookup in the step itself.
        is_exact: whether it trains as `base` does, up to the order of sums.
        num_batches: most batches that a device holds at a time.
        num_arrived: number of those of which it also holds the redistributed ids.
    """

    next_ids: bool = False
    next_lookup: str | None = None
    is_exact: bool = True
    num_batches: int = 2
    num_arrived: int = 1


PIPELINES = {
    "base": Pipeline(),
    "sparse_dist": Pipeline(next_ids=True, num_batches=3, num_arrived=2),
    "sparse_dist_lite": Pipeline(),
    "fused_sparse_dist": Pipeline(
        next_ids=True, next_lookup=OPTIMIZER, num_batches=3, num_arrived=2
    ),
    "semi_sync": Pipeline(
        next_ids=True, next_lookup=TOP_BACKWARD, is_exact=False, num_batches=3, num_arrived=3
    ),
}
"""By name."""


def default_pipeline(compute_device: str) -> str:
    """Return the name of the pipeline for a device; on a CPU nothing runs beside anything."""
    return "sparse_dist" if compute_device == "cuda" else "base"


def pipeline_name(asked: str, compute_device: str) -> str:
    """Return the name that is asked for, or the default for `auto`."""
    return default_pipeline(compute_device) if asked == AUTO else asked
