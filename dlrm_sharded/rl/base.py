"""The protocol between a policy and the sharder that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dlrm_sharded.plans.task import ShardingTask


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that may become the plan.

    Args:
        ranks: the rank of each table, in the order of the task.
        origin: what the log calls it, such as "a sample".
    """

    ranks: tuple[int, ...]
    origin: str


class Policy(Protocol):
    """Places whole tables. It is trained for one hardware, for any number of tables and ranks."""

    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """Return the rank of each table, or None if some table fits no rank.

        Args:
            task: a task whose tables all have a reuse histogram.
            num_samples: how many placements to draw besides the most probable one; the policy
                returns the one whose cost it predicts to be the lowest.
        """

    def candidates(self, task: ShardingTask, *, num_samples: int, seed: int) -> list[Candidate]:
        """Return all placements among which `place` chooses, the most probable one first.

        They are different, and all of them fit. The list is empty where `place` returns None.
        """
