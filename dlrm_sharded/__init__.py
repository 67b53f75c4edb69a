"""Decide where the embedding tables of a recommendation model go, and train with the decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology
from dlrm_sharded.validation import validate

if TYPE_CHECKING:
    from dlrm_sharded.sharded_planner import ShardedPlanner

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


def __getattr__(name: str) -> Any:
    """Load the planner when it is asked for: it needs TorchRec, the values above do not."""
    if name == "ShardedPlanner":
        from dlrm_sharded.sharded_planner import ShardedPlanner

        return ShardedPlanner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
