"""What a policy is to the sharder that uses it."""

from __future__ import annotations

from typing import Protocol

from dlrm_sharded.task import ShardingTask


class Policy(Protocol):
    """Places whole tables. Trained for some hardware, for any number of tables and ranks."""

    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """The rank of each table; None where it found no room for one of them.

        Args:
            task: with a reuse histogram for every table.
            num_samples: placements drawn beside the most probable one, fewer on many ranks; the
                one of the least predicted cost is taken.
        """
