"""Repeats a measurement beside which other processes had a rank's core."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.measuring.stage_clock import max_over_ranks
from dlrm_sharded.ranks.surroundings import core_wait_s

MAX_TRIES = 3
"""Number of times that a plan is measured at most until nothing disturbs it."""

FREE_OF_WAITS = 0.25
"""Share of the time in which others may have a rank's core. Gloo's own threads had it for 5 to 14 %
on 2 cores of an idle Intel Xeon; a busy process takes half."""


def least_disturbed(
    measure: Callable[[], MeasuredCost],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    has_cores: bool,
) -> tuple[MeasuredCost, Disturbance]:
    """Measure until no other work has a rank's core; all ranks of the group call it together.

    Args:
        has_cores: whether every rank has a core. Where ranks share cores, as those of a small
            exchange do, they wait for each other, and on a GPU other work is on the host: nothing
            is known then.

    Returns:
        The measurement beside the least other work, and what this was.
    """
    found: list[tuple[float, MeasuredCost]] = []
    for _ in range(MAX_TRIES):
        started_s, waited_s = time.perf_counter(), core_wait_s()
        measured = measure()
        if device.type != "cpu" or not has_cores:
            return measured, Disturbance()
        share = (core_wait_s() - waited_s) / (time.perf_counter() - started_s)
        found.append((max_over_ranks(share, device, group), measured))
        if found[-1][0] <= FREE_OF_WAITS:
            return measured, Disturbance()
    least, measured = min(found, key=lambda pair: pair[0])
    return measured, Disturbance(core_wait=least)
