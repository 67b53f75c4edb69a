"""Lets the ranks of a host share its cores, when it has fewer cores than ranks that compute.

All ranks of the host that compute at a time progress equally fast, as an operating system's
scheduler shares cores between processes. A rank that waits in an exchange leaves its share to the
others, so a host with half as many cores doubles the work of a balanced plan, and costs one long
rank among short ones much less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CoreSharing:
    """The cores of each host of a cluster.

    Args:
        ranks_per_host: ranks 0, 1, ... are on the first host.
        ranks_at_once: number of ranks that its cores can run at full speed, above 0.
    """

    ranks_per_host: int
    ranks_at_once: float

    def ends_ms(self, begins_ms: Times, work_ms: Times) -> Times:
        """Return when each rank has done its work, [W].

        Args:
            begins_ms: [W], when a rank begins to compute.
            work_ms: [W], how long it would compute on cores of its own.
        """
        ends = np.empty_like(begins_ms)
        for first in range(0, len(begins_ms), self.ranks_per_host):
            host = slice(first, first + self.ranks_per_host)
            ends[host] = self._ends_on_host(begins_ms[host], work_ms[host])
        return ends

    def _ends_on_host(self, begins_ms: Times, work_ms: Times) -> Times:
        """Go from one begin or end of a rank to the next; speeds are constant between them."""
        if len(begins_ms) <= self.ranks_at_once:
            return begins_ms + work_ms
        left, ends = work_ms.copy(), np.where(work_ms > 0, np.inf, begins_ms)
        now = float(begins_ms.min())
        while np.isinf(ends).any():
            computing = np.isinf(ends) & (begins_ms <= now)
            later = begins_ms[begins_ms > now]
            next_begin = float(later.min()) if len(later) else np.inf
            if not computing.any():
                now = next_begin
                continue
            speed = min(1.0, self.ranks_at_once / int(computing.sum()))
            first_end = now + float(left[computing].min()) / speed
            until = min(next_begin, first_end)
            left[computing] -= (until - now) * speed
            if first_end <= next_begin:
                done = computing & (left <= left[computing].min())
                ends[done] = until
            now = until
        return ends
