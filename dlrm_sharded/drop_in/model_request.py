"""A request for a plan: it has a model's tables as a task, and knows how its modules train them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from dlrm_sharded.drop_in.find_tables import find_tables, shardable
from dlrm_sharded.drop_in.fixed_tables import SharderBesideFixed
from dlrm_sharded.drop_in.module_tables import ROW_TYPES, ModuleTables
from dlrm_sharded.drop_in.optimizer_state import with_optimizer_state
from dlrm_sharded.drop_in.parameter_constraints import ConstrainedTables, in_row_blocks, passed_on
from dlrm_sharded.files.errors import InfeasibleTaskError, ShardingError
from dlrm_sharded.model.torchrec_adapter import parameter_sharding
from dlrm_sharded.plans.layouts import layout_of
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.sharders.planning import Planner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The tables of a model, with what is known of their accesses.

    Args:
        tables: with the layouts that modules and constraints leave them.
        modules: those tables, with their accesses.
        deduplicating: paths of the modules whose TorchRec sharder has `use_index_dedup`.
        seconds: time that it took to find all this.
    """

    task: ShardingTask
    tables: ConstrainedTables
    modules: Sequence[ModuleTables]
    deduplicating: tuple[str, ...]
    seconds: float

    def torchrec_plan(
        self, plan: ShardingPlan, constraints: Mapping[str, ParameterConstraints]
    ) -> TorchRecPlan:
        """Return TorchRec's form of a plan, with what constraints pass on to it.

        Raises:
            InvalidPlanError: a module cannot train its part.
        """
        topology = self.task.topology
        return TorchRecPlan(
            {found.path: _module_plan(found, plan, topology, constraints) for found in self.modules}
        )

    def planned(self, planner: Planner) -> tuple[ModelRequest, ShardingPlan, PlanReport]:
        """Return what was planned, its plan and a report on it.

        Where nothing fits, modules whose tables all pool by the mean are planned in row blocks.

        Raises:
            ConfigError, ShardingError: as `Planner.plan`.
        """
        try:
            return self, *_beside_fixed(planner, self.tables).plan(self.task)
        except InfeasibleTaskError as error:
            for other in self._in_row_blocks():
                with contextlib.suppress(ShardingError):
                    planned = _beside_fixed(planner, other.tables).plan(other.task)
                    log.info("tables that pool by the mean lie in row blocks: nothing else fits")
                    return other, *planned
            reasons = [found.why_no_row_blocks for found in self.modules]
            if not any(reasons):
                raise
            raise InfeasibleTaskError(f"{error}; {next(filter(None, reasons))}") from error

    def _in_row_blocks(self) -> Iterator[ModelRequest]:
        """Yield the request with means in row blocks: those of the largest module, then of more."""
        request, topology = self, self.task.topology
        if topology.world_size == 1:
            return

        def size_bytes(found: ModuleTables) -> int:
            return sum(map(topology.table_bytes, found.tables.values()))

        for found in sorted(self.modules, key=size_bytes, reverse=True):
            free = found.averages_all and self.tables.fixed.keys().isdisjoint(found.allowed)
            if not (free and all(types & ROW_TYPES for types in found.allowed.values())):
                continue
            rows, fixed = in_row_blocks(found, topology, "no plan with its module in others fits")
            layouts = {table.name: table.layouts for table in rows.tables.values()}
            request = dataclasses.replace(
                request,
                task=request.task.with_values(layouts=layouts),
                tables=dataclasses.replace(request.tables, fixed={**request.tables.fixed, **fixed}),
                modules=[rows if of.path == rows.path else of for of in request.modules],
            )
            yield request


def model_request(
    model: nn.Module,
    sharders: list[ModuleSharder[Any]],
    topology: Topology,
    *,
    batch_size: int,
    constrain: Callable[..., ConstrainedTables],
    measure: Callable[[Sequence[ModuleTables]], Sequence[ModuleTables]] | None,
) -> ModelRequest:
    """Find the tables that some sharders can shard.

    Args:
        batch_size: samples of all ranks together.
        constrain: `constrained` with the user's constraints.
        measure: measures the accesses of the tables; None if there are no data.

    Raises:
        ConfigError: there is no such module, or one that cannot be planned.
    """
    started_s = time.perf_counter()
    found = find_tables(model, sharders, topology)
    topology = with_optimizer_state(topology, model, sharders, found)
    tables = constrain(found, topology, batch_size / topology.world_size)
    modules = tables.modules if measure is None else measure(tables.modules)
    task = ShardingTask(
        tables=tuple(table for of in modules for table in of.tables.values()),
        topology=topology,
        batch_size=batch_size,
    )
    deduplicating = tuple(
        path
        for path, _, sharder in shardable(model, sharders)
        if getattr(sharder, "_use_index_dedup", False)
    )
    seconds = time.perf_counter() - started_s
    return ModelRequest(task, tables, modules, deduplicating, seconds)


def _beside_fixed(planner: Planner, tables: ConstrainedTables) -> Planner:
    """Return the planner, with the tables that have no choice beside its sharder's."""
    is_file = isinstance(planner.sharder, PlanFileSharder)  # it has those tables, too
    if is_file or not (tables.fixed or tables.min_columns):
        return planner
    beside = SharderBesideFixed(planner.sharder, tables.fixed, tables.min_columns)
    return dataclasses.replace(planner, sharder=beside)


def _module_plan(
    found: ModuleTables,
    plan: ShardingPlan,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
) -> EmbeddingModuleShardingPlan:
    """Return TorchRec's plan of a module; raise InvalidPlanError if the module cannot train it."""
    shards = plan.shards_by_table()
    module_plan = {}
    for parameter, table in found.tables.items():
        own = shards[table.name]
        module_plan[parameter] = dataclasses.replace(
            parameter_sharding(own, layout_of(own, table, topology), topology),
            sharding_type=found.torchrec_type(own, table, topology),
            **passed_on(constraints.get(parameter)),
        )
    found.check(plan, topology)
    return EmbeddingModuleShardingPlan(module_plan)
