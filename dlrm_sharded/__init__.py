"""Decide where the embedding tables of a recommendation model go, and train with the decision."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.version_sets import installed_versions, version_problem
from dlrm_sharded.sharders.base import Sharder

if TYPE_CHECKING:
    from dlrm_sharded.drop_in.sharded_planner import ShardedPlanner

__all__ = [
    "Shard",
    "ShardedPlanner",
    "Sharder",
    "ShardingPlan",
    "ShardingTask",
    "Table",
    "Topology",
    "validate",
]

# A log message, because a warning would be an error to those who run Python with -W error, and one
# rank stands for all. Without a configured log, Python prints it on stderr.
if os.environ.get("RANK", "0") == "0" and (problem := version_problem(installed_versions())):
    logging.getLogger(__name__).warning("%s", problem)


def __getattr__(name: str) -> Any:
    """Load the planner when it is asked for: it needs TorchRec, the values above do not."""
    if name == "ShardedPlanner":
        from dlrm_sharded.drop_in.sharded_planner import ShardedPlanner

        return ShardedPlanner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
