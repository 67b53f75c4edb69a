"""Names of the parts of a step, and the times of its dense part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Count, NotNegative
from dlrm_sharded.plans.plan_cost import (
    BACKWARD_STAGES,
    EXCHANGE_STAGES,
    FORWARD_STAGES,
    INPUT_DIST,
    STAGE_LABELS,
)

DATA = "data"
DENSE_FORWARD = "dense_forward"
DENSE_BACKWARD = "dense_backward"
ALL_REDUCE = "all_reduce"
OPTIMIZER = "optimizer"
WAITING = "waiting"
HOST_WAIT = "host_wait"
OTHER = "other"

PARTS = (
    DATA,
    INPUT_DIST,
    *FORWARD_STAGES,
    DENSE_FORWARD,
    DENSE_BACKWARD,
    *BACKWARD_STAGES,
    ALL_REDUCE,
    OPTIMIZER,
    WAITING,
    HOST_WAIT,
    OTHER,
)
"""Parts that the time of a step goes to, in their order: reading the batch, redistributing its
ids, looking up and exchanging pooled vectors, the dense layers and back, the all-reduce of the
dense part's gradients, the optimizer of the dense part; waiting for other ranks, waiting for a host
that launches work more slowly than its GPU does it, and the rest."""

EXCHANGES = (INPUT_DIST, *EXCHANGE_STAGES, ALL_REDUCE)
"""Parts in which ranks wait for each other."""

PART_LABELS = STAGE_LABELS | {
    DATA: "data",
    INPUT_DIST: "ids redistributed",
    DENSE_FORWARD: "dense forward",
    DENSE_BACKWARD: "dense backward",
    ALL_REDUCE: "all-reduce",
    OPTIMIZER: "optimizer",
    WAITING: "waiting for other ranks",
    HOST_WAIT: "waiting for the host",
    OTHER: "other",
}
"""Names of the parts in texts and pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTimes:
    """Times of what a step does beside the embeddings, on one rank with its local batch, in ms.

    The bottom layers take the dense features, and the top layers take the vectors of all features:
    they include the interaction and the loss (arXiv:1906.00091, sec. 2).

    Args:
        data_ms: time to read the batch and copy it to the device.
        optimizer_ms: time to update the dense part and to reset its gradients.
        other_ms: time that the loop itself takes.
        launch_ms: time that the host takes to launch all this on a GPU, which computes meanwhile;
            0 on a CPU, which launches nothing. It is not part of the total.
        gradient_bytes: size of the gradients that ranks all-reduce.
        spread: standard deviation of the time of the layers relative to its mean.
    """

    data_ms: NotNegative
    bottom_forward_ms: NotNegative
    top_forward_ms: NotNegative
    top_backward_ms: NotNegative
    bottom_backward_ms: NotNegative
    optimizer_ms: NotNegative
    other_ms: NotNegative = 0.0
    launch_ms: NotNegative = 0.0
    gradient_bytes: Count = 0
    spread: NotNegative = 0.0

    @property
    def total_ms(self) -> float:
        """Sum of all times of the device."""
        return sum(
            getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name.endswith("_ms") and field.name != "launch_ms"
        )

    def scaled(self, factor: float) -> DenseTimes:
        """Return the times of a device that takes `factor` times as long for the layers."""
        layers = ("bottom_forward_ms", "top_forward_ms", "top_backward_ms", "bottom_backward_ms")
        return dataclasses.replace(self, **{key: factor * getattr(self, key) for key in layers})

    def to_json(self) -> dict[str, float]:
        """Return the times by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DenseTimes:
        """Read what `to_json` returned.

        Raises:
            DataError: a time is missing, unknown, or no finite number from 0.
        """
        return read_form(fields, cls, name="the times of the dense part")


NO_DENSE = DenseTimes(
    data_ms=0.0,
    bottom_forward_ms=0.0,
    top_forward_ms=0.0,
    top_backward_ms=0.0,
    bottom_backward_ms=0.0,
    optimizer_ms=0.0,
)
"""A step of embeddings alone."""
