"""What every sharder is: heuristic, search, learned policy, or the user's own."""

from __future__ import annotations

from typing import Protocol

from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.task import ShardingTask


class Sharder(Protocol):
    """Decides where tables go. Hyperparameters go to `__init__`, data to `shard`.

    `shard` is pure: the same task and seed give the same plan; no device, no process group, no
    global random state, no mutation of the task.
    """

    def shard(self, task: ShardingTask) -> ShardingPlan:
        """Make a plan that `dlrm_sharded.plan.validate` accepts.

        Raises:
            InfeasibleTaskError: no plan within the ranks' memory was found.
            InvalidPlanError: a plan that was made before does not suit the task.
        """
