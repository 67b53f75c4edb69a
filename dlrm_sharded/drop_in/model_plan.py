"""Plans the tables of a model, and translates the plan to TorchRec's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from dlrm_sharded.drop_in.fixed_tables import WithFixedTables
from dlrm_sharded.drop_in.module_tables import MEANS_IN_ROW_BLOCKS
from dlrm_sharded.drop_in.parameter_constraints import ConstrainedTables, passed_on
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.model.torchrec_adapter import parameter_sharding
from dlrm_sharded.plans.layouts import layout_of
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.sharders.planning import Planner


@dataclass(frozen=True, slots=True)
class ModelTask:
    """The tables of a model as a task, with what its modules can train.

    Args:
        optimizer: name of the fused optimizer that all tables have; None if there is none.
    """

    task: ShardingTask
    tables: ConstrainedTables
    optimizer: str | None

    def plan(self, planner: Planner) -> tuple[ShardingPlan, PlanReport]:
        """Return a planner's plan; tables without a choice are placed before its sharder plans.

        Raises:
            ConfigError, ShardingError: as `Planner.plan`.
        """
        tables = self.tables
        is_file = isinstance(planner.sharder, PlanFileSharder)  # it has those tables, too
        if not is_file and (tables.fixed or tables.min_columns):
            with_fixed = WithFixedTables(planner.sharder, tables.fixed, tables.min_columns)
            planner = dataclasses.replace(planner, sharder=with_fixed)
        try:
            return planner.plan(self.task)
        except InfeasibleTaskError as error:
            means = (table for of in tables.modules for table in map(of.tables.get, of.averaged))
            is_too_large = self.task.table_bytes > sum(self.task.topology.rank_memory_bytes)
            if is_too_large or all(table is None or table.layouts & {"rows"} for table in means):
                raise
            raise InfeasibleTaskError(f"{error}; {MEANS_IN_ROW_BLOCKS}") from error

    def torchrec_plan(
        self, plan: ShardingPlan, constraints: Mapping[str, ParameterConstraints]
    ) -> TorchRecPlan:
        """Return TorchRec's form of a plan, with the fields that constraints pass on.

        Raises:
            InvalidPlanError: a module cannot train its part.
        """
        shards, topology = plan.shards_by_table(), self.task.topology
        by_module = {}
        for module in self.tables.modules:
            types, parameters = module.torchrec_types(plan, topology), {}
            for name, table in module.tables.items():
                own = shards[table.name]
                parameters[name] = dataclasses.replace(
                    parameter_sharding(own, layout_of(own, table, topology), topology),
                    sharding_type=types[name],
                    **passed_on(constraints.get(name)),
                )
            by_module[module.path] = EmbeddingModuleShardingPlan(parameters)
        return TorchRecPlan(by_module)
