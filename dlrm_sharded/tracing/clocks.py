"""Relates the clocks of ranks, which differ between hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROUND_TRIPS = 32
"""Messages that rank 0 exchanges with every rank of another host; the fastest one counts."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The difference between a rank's clock and that of rank 0, in ns.

    Args:
        ahead_ns: what the rank's clock shows more than that of rank 0.
        uncertainty_ns: half of the round trip; 0 for ranks of the same host, which share a clock.
    """

    ahead_ns: int
    uncertainty_ns: int


SAME_CLOCK = ClockOffset(0, 0)


def host_clock() -> str:
    """Return a name of this host's clock, which the containers of a host have in common."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


def clock_names(own: str, group: dist.ProcessGroup) -> list[str]:
    """Return the names of all ranks' clocks; a collective of the group."""
    names = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, own, group=group)
    return names


def compare_clocks(
    group: dist.ProcessGroup,
    *,
    now_ns: Callable[[], int] = time.time_ns,
    clock_name: str | None = None,
) -> tuple[ClockOffset, ...]:
    """Return the offset of every rank; all ranks of a gloo group call it together.

    Rank 0 sends its question, and the other rank answers with its time. Half way between question
    and answer, that was the time of rank 0, up to half of the round trip.
    """
    me, world_size = dist.get_rank(group), dist.get_world_size(group)
    names = clock_names(clock_name or host_clock(), group)
    offsets = []
    for rank in range(world_size):
        if names[rank] == names[0]:
            offsets.append(SAME_CLOCK)
        elif me == 0:
            offsets.append(_ask(rank, group, now_ns))
        elif me == rank:
            _answer(group, now_ns)
    sent: list[list[ClockOffset]] = [offsets]
    dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
    return tuple(sent[0])


def _ask(rank: int, group: dist.ProcessGroup, now_ns: Callable[[], int]) -> ClockOffset:
    """Return the offset of a rank by the fastest round trip."""
    answer = torch.zeros(1, dtype=torch.int64)
    peer = dist.get_global_rank(group, rank)
    found = []
    for _ in range(ROUND_TRIPS):
        asked = now_ns()
        dist.send(answer, dst=peer, group=group)
        dist.recv(answer, src=peer, group=group)
        answered = now_ns()
        ahead = int(answer) - (asked + answered) // 2
        found.append(ClockOffset(ahead, (answered - asked + 1) // 2))
    return min(found, key=lambda offset: offset.uncertainty_ns)


def _answer(group: dist.ProcessGroup, now_ns: Callable[[], int]) -> None:
    question = torch.zeros(1, dtype=torch.int64)
    zero = dist.get_global_rank(group, 0)
    for _ in range(ROUND_TRIPS):
        dist.recv(question, src=zero, group=group)
        dist.send(torch.tensor([now_ns()]), dst=zero, group=group)


def between(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """Return the offset half way between two comparisons; clocks may drift apart meanwhile."""
    drift = abs(after.ahead_ns - before.ahead_ns) // 2
    return ClockOffset(
        (before.ahead_ns + after.ahead_ns) // 2,
        max(before.uncertainty_ns, after.uncertainty_ns) + drift,
    )
