"""The order in which a collection measures plans of both kinds, and some of them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.process import num_cores

REPEAT_LAG = 100
"""Number of plans between two measurements of the same plan."""

KINDS = ("computation", "computation", "communication")
"""Kinds of successive plans, which repeat."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One measurement of the schedule.

    Args:
        number, attempt: number of the plan, and how often it was measured before.
        world_size: number of ranks that measure it.
    """

    kind: str
    number: int
    attempt: int
    world_size: int


def schedule(
    num_samples: int,
    computation_ranks: int,
    communication_ranks: Sequence[int],
    *,
    repeat_every: int,
    num_repeats: int,
) -> Iterator[Slot]:
    """Yield all measurements in order: kinds alternate, so that any prefix is representative.

    Args:
        num_samples: number of plans.
        computation_ranks, communication_ranks: see `group_sizes`.
        repeat_every, num_repeats: see `CollectConfig`.
    """

    def slot(number: int, attempt: int) -> Slot:
        kind = KINDS[number % len(KINDS)] if communication_ranks else "computation"
        world_size = computation_ranks
        if kind == "communication":
            rounds, place = divmod(number, len(KINDS))
            turn = rounds * KINDS.count(kind) + KINDS[:place].count(kind)
            world_size = communication_ranks[turn % len(communication_ranks)]
        return Slot(kind, number, attempt, world_size)

    lag = min(REPEAT_LAG, num_samples)
    for step in range(num_samples + lag * num_repeats):
        for attempt in range(num_repeats + 1):
            number = step - attempt * lag
            is_repeated = attempt == 0 or number % repeat_every == 0
            if 0 <= number < num_samples and is_repeated:
                yield slot(number, attempt)


def group_sizes(rank: Rank) -> tuple[int, list[int]]:
    """Return how many ranks compute at once, and sizes of exchange groups.

    Of the ranks on CPUs, only as many compute at once as have cores for their threads.
    """
    computing, per_host = rank.world_size, rank.local_world_size
    if rank.device.type == "cpu":
        computing = min(per_host, max(num_cores() // torch.get_num_threads(), 1))
    powers = {2**i for i in range(1, rank.world_size.bit_length())}
    whole_hosts = {size for size in powers if size <= per_host or size % per_host == 0}
    return computing, sorted({*whole_hosts, rank.world_size} - {1})
