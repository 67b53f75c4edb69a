"""The protocol between a policy and the sharder that uses it."""

from __future__ import annotations

from typing import Protocol

from dlrm_sharded.plans.task import ShardingTask


class Policy(Protocol):
    """Places whole tables; trained for one kind of hardware, any number of tables and ranks."""

    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """Return the rank of each table, or None if some table fits no rank.

        Args:
            task: a task whose tables all have a reuse histogram.
            num_samples: how many placements to draw besides the most probable one; the policy
                returns the one whose cost it predicts to be the lowest.
        """
