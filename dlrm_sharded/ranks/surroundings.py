"""Watches what else runs where ranks compute, as measurements beside other work are slower."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where and beside what all ranks computed for some time.

    Args:
        hosts: load average of each host at the beginning, by its name.
        began_s: the beginning, in seconds since 1970.
        core_wait: largest share of the time in which a rank could have run, and others had the
            cores; 0 where the kernel does not tell.
    """

    hosts: Mapping[str, float]
    began_s: float
    core_wait: float


class SurroundingsWatch:
    """Watches the surroundings of this rank from its making on."""

    def __init__(self) -> None:
        self._load = round(os.getloadavg()[0], 2)
        self._began_s = time.time()
        self._started_s, self._waited_s = time.perf_counter(), core_wait_s()

    def conclude(self) -> Surroundings:
        """Return the surroundings of all ranks; a collective of them."""
        share = (core_wait_s() - self._waited_s) / (time.perf_counter() - self._started_s)
        found: list[tuple[str, float, float]] = [("", 0.0, 0.0)] * dist.get_world_size()
        dist.all_gather_object(found, (socket.gethostname(), self._load, share))
        return Surroundings(
            hosts={host: load for host, load, _ in found},
            began_s=self._began_s,
            core_wait=max(share for _, _, share in found),
        )


def core_wait_s() -> float:
    """Return how long this thread could have run and did not, since its start; 0 if not known."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, LookupError, ValueError):
        return 0.0
