"""Decide where the embedding tables of a recommendation model go, and train with the decision.

All names that users import are here; other modules may move.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlrm_sharded.files.errors import (
    ConfigError,
    DataError,
    InfeasibleTaskError,
    InvalidPlanError,
    ShardingError,
)
from dlrm_sharded.plans.plan import Shard, ShardingPlan, read_plan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology, read_task
from dlrm_sharded.plans.task_frame import task_from_frame
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.version_sets import installed_versions, version_problem

if TYPE_CHECKING:
    from dlrm_sharded.calibration.priors import learned_cost_model
    from dlrm_sharded.checkpoint.exported import load_exported
    from dlrm_sharded.commands.sharders import make_sharder
    from dlrm_sharded.cost.linear import LinearCostModel
    from dlrm_sharded.drop_in.sharded_planner import ShardedPlanner, plan_model
    from dlrm_sharded.hardware.context import RunContext
    from dlrm_sharded.search.constraints import Constraints
    from dlrm_sharded.sharders.base import Sharder, SharderContext
    from dlrm_sharded.sharders.planning import Planner
    from dlrm_sharded.sharders.search import SearchSharder

__all__ = [
    "ConfigError",
    "Constraints",
    "DataError",
    "InfeasibleTaskError",
    "InvalidPlanError",
    "LinearCostModel",
    "PlanCost",
    "PlanReport",
    "Planner",
    "RunContext",
    "SearchSharder",
    "Shard",
    "ShardedPlanner",
    "Sharder",
    "SharderContext",
    "ShardingError",
    "ShardingPlan",
    "ShardingTask",
    "StageCost",
    "Table",
    "Topology",
    "learned_cost_model",
    "load_exported",
    "make_sharder",
    "plan_model",
    "read_plan",
    "read_task",
    "task_from_frame",
    "validate",
]

_LOADED_WHEN_ASKED = {
    "Constraints": "search.constraints",
    "LinearCostModel": "cost.linear",
    "SearchSharder": "sharders.search",
    "Planner": "sharders.planning",
    "RunContext": "hardware.context",
    "ShardedPlanner": "drop_in.sharded_planner",
    "Sharder": "sharders.base",
    "SharderContext": "sharders.base",
    "learned_cost_model": "calibration.priors",
    "load_exported": "checkpoint.exported",
    "make_sharder": "commands.sharders",
    "plan_model": "drop_in.sharded_planner",
}
"""Modules of the names that are imported on first use, because they need other libraries."""

# This is logged, not warned of, because a warning would be an error under python -W error. Rank 0
# logs it for all ranks. Without a configured log, Python prints it on stderr.
if os.environ.get("RANK", "0") == "0" and (problem := version_problem(installed_versions())):
    logging.getLogger(__name__).warning("%s", problem)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a name on first use if it needs other libraries, such as TorchRec or SciPy."""
    if name in _LOADED_WHEN_ASKED:
        return getattr(import_module(f"{__name__}.{_LOADED_WHEN_ASKED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
