"""Plans TorchRec models of any kind with any sharder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingPlanner as TorchRecPlanner

from dlrm_sharded.cost.base import AdditiveCostModel, PricedTask, caveat_of
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.drop_in.find_tables import find_tables
from dlrm_sharded.drop_in.module_tables import ModuleTables
from dlrm_sharded.drop_in.optimizer_state import with_optimizer_state
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.model.torchrec_adapter import parameter_sharding
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, can_split_rows, layout_of
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.task import MEMORY_KEYS, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.distributed import detect_topology, with_memory_of_all_ranks
from dlrm_sharded.search.build_problem import worth_replicating
from dlrm_sharded.sharders.base import Sharder

log = logging.getLogger(__name__)

DEFAULT_LOCAL_BATCH_SIZE = 512
"""Samples per rank that TorchRec's planner assumes by default."""


@dataclass(eq=False)
class ShardedPlanner(TorchRecPlanner):
    """Replaces TorchRec's `EmbeddingShardingPlanner` and plans with any sharder.

    It plans the tables of all modules of a model together. Each table lies only where its module's
    TorchRec sharder trains it. Tables that train in row blocks alone, as those with managed
    collisions do, lie in row blocks on all ranks, and the sharder places the others beside them.

    A table with a fused optimizer (`apply_optimizer_in_backward`) would leave it as a replica:
    TorchRec then trains it by the dense optimizer, if that has its parameter at all. So no table is
    replicated unless `replicas` asks for it. If it does, plan before you fuse optimizers, fuse them
    into the tables that the plan shards, and give the dense optimizer the same rule and rate for
    the tables that the plan calls `data_parallel`.

    The attribute `report` is a sentence on the last plan, which is logged, too; None before.

    Args:
        topology: ranks of the model; by default those of this job, with their free memory. The
            state of optimizers that are fused into the tables counts as memory in either case.
        batch_size: global batch size; 512 samples per rank by default.
        pooling_factors: mean ids per sample by table name; 1 for tables that are missing.
        replicas: whether tables may be replicated.
        cost_model: predicts the critical path for `report`, and what replicas would gain; None for
            neither.
    """

    sharder: Sharder
    _: KW_ONLY
    topology: Topology | None = None
    batch_size: int | None = None
    pooling_factors: Mapping[str, float] | None = None
    replicas: bool = False
    cost_model: AdditiveCostModel | None = None
    report: str | None = field(default=None, init=False)

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> TorchRecPlan:
        """Plan the modules that `sharders` can shard.

        Raises:
            ConfigError: there is no such module, or one that cannot be planned.
            ShardingError: there is no plan, or the module does not train the sharder's.
        """
        plan, self.report = self._plan(module, sharders, self.topology or detect_topology())
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> TorchRecPlan:
        """Plan on rank 0 of the group; every rank returns the plan or raises the exception.

        Args:
            sharders: as for `plan`; TorchRec's default sharders if None.
            pg: ranks of the model; all ranks of the job if None.
        """
        chosen = get_default_sharders() if sharders is None else sharders
        topology = self.topology
        if topology is None:
            with all_or_none(group=pg):
                topology = detect_topology(group=pg)
            topology = with_memory_of_all_ranks(topology, group=pg)
        plan, self.report = on_rank_zero(lambda: self._plan(module, chosen, topology), group=pg)
        return plan

    def _plan(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]], topology: Topology
    ) -> tuple[TorchRecPlan, str]:
        topology = with_optimizer_state(topology, module, sharders)
        modules = find_tables(
            module, sharders, topology, self.pooling_factors or {}, replicas=self.replicas
        )
        task = ShardingTask(
            tables=tuple(table for found in modules for table in found.tables.values()),
            topology=topology,
            batch_size=self.batch_size or DEFAULT_LOCAL_BATCH_SIZE * topology.world_size,
        )
        self._warn_of_other_device(topology)
        plan = self._shard(task, modules)
        validate(plan, task)
        torchrec_plan = TorchRecPlan(
            {found.path: _module_plan(found, plan, topology) for found in modules}
        )
        if not plan.exchange_precision.is_exact:
            log.warning(
                "the plan is for exchanges in %s, which a TorchRec plan does not carry; give the "
                "sharders a qcomm_codecs_registry of that precision",
                plan.exchange_precision,
            )
        report = self._report(task, plan, modules)
        log.info("%s", report)
        return torchrec_plan, report

    def _warn_of_other_device(self, topology: Topology) -> None:
        """Warn if the prices of the sharder or of the report are those of another device."""
        context = getattr(self.sharder, "context", None)
        priced_by = (getattr(context, "cost_model", None), self.cost_model)
        for caveat in {caveat_of(model, topology) for model in priced_by} - {None}:
            log.warning(
                "%s; for these ranks, make context and prices with RunContext(device=%r)",
                caveat,
                topology.compute_device,
            )

    def _shard(self, task: ShardingTask, modules: Sequence[ModuleTables]) -> ShardingPlan:
        """Return row blocks for the tables that have no other layout, and the sharder's plan."""
        topology = task.topology
        fixed: list[Shard] = []
        for found in modules:
            for table in found.tables.values() if found.only_in_rows else ():
                if not can_split_rows(table, topology):
                    raise InfeasibleTaskError(
                        f"table {table.name!r} of {found.title} has {table.num_embeddings:,} rows "
                        f"and {table.embedding_dim:,} columns; its TorchRec sharder trains it only "
                        f"{', '.join(sorted(found.sharding_types))}, here in row blocks on all "
                        f"{topology.world_size} ranks with a row or more, and "
                        f"{topology.max_shard_columns:,} columns at most: use fewer ranks"
                    )
                fixed += RowBlocks(range(topology.world_size)).shards(table)
        names = {shard.table for shard in fixed}
        others = tuple(table for table in task.tables if table.name not in names)
        beside = ShardingPlan(topology.world_size, tuple(fixed))
        if not fixed or not others:
            return self.sharder.shard(task) if others else beside
        used = beside.bytes_by_rank(topology)
        free = [have - own for have, own in zip(topology.rank_memory_bytes, used, strict=True)]
        if min(free) < 1:
            rank = free.index(min(free))
            raise InfeasibleTaskError(
                f"{len(names)} tables have to lie in row blocks on all ranks, which take "
                f"{used[rank]:,} B of rank {rank}, and it has {free[rank] + used[rank]:,} B; add "
                f"ranks or memory ({MEMORY_KEYS})"
            )
        limited = dataclasses.replace(topology, memory_bytes_by_rank=tuple(free))
        plan = self.sharder.shard(dataclasses.replace(task, tables=others, topology=limited))
        return dataclasses.replace(plan, shards=(*plan.shards, *fixed))

    def _report(
        self, task: ShardingTask, plan: ShardingPlan, modules: Sequence[ModuleTables]
    ) -> str:
        """Return a sentence on the plan: its predicted times, their bound, and what replicas gain.

        As elsewhere, prices of another device come with a caveat, and without a bound.
        """
        replicated = len(plan.replicated_tables)
        counts = {"table": len(task.tables), "rank": task.topology.world_size}
        text = " on ".join(f"{n} {noun}{'s' if n > 1 else ''}" for noun, n in counts.items())
        text += f", {replicated} of them replicated" if self.replicas else ""
        model = self.cost_model
        if model is None:
            unknown = "" if self.replicas else ", nor what replicas would gain"
            return f"{text}; without cost_model, their critical path is not predicted{unknown}"
        priced = model.price(task, plan.exchange_precision)
        task = priced.task
        cost = model.predict(plan, task)
        now_ms = cost.critical_path_ms
        text += f", predicted critical path {now_ms:.2f} ms, cost {cost.cost_ms:.2f} ms"
        if priced.caveat is not None:
            text += " (see the caveat)"
        elif bound_ms := lower_bound_ms(priced):
            gap = cost.cost_ms / bound_ms - 1
            text += f", at most {100 * gap:z.1f} % above the best possible, {bound_ms:.2f} ms"
        if self.replicas or not (with_replicas := _with_replicas(plan, modules, priced)):
            return text
        then_ms = model.predict(with_replicas, task).critical_path_ms
        if then_ms >= now_ms:
            return text
        return (
            f"{text}; replicas of {len(with_replicas.replicated_tables)} tables would save "
            f"{now_ms - then_ms:.2f} ms ({1 - then_ms / now_ms:.1%}): for them, use "
            "ShardedPlanner(replicas=True) and train them by the dense optimizer, see its docstring"
        )


def _module_plan(
    found: ModuleTables, plan: ShardingPlan, topology: Topology
) -> EmbeddingModuleShardingPlan:
    """Return TorchRec's plan of a module; raise InvalidPlanError if the module cannot train it."""
    shards = plan.shards_by_table()
    module_plan = {}
    for parameter, table in found.tables.items():
        own = shards[table.name]
        module_plan[parameter] = dataclasses.replace(
            parameter_sharding(own, layout_of(own, table, topology), topology),
            sharding_type=found.torchrec_type(own, table, topology),
        )
    found.check(plan, topology)
    return EmbeddingModuleShardingPlan(module_plan)


def _with_replicas(
    plan: ShardingPlan, modules: Sequence[ModuleTables], priced: PricedTask
) -> ShardingPlan | None:
    """Return a plan with replicas in the place of tables for which they pay; None if none do.

    Replicas that no longer fit beside those of smaller tables are left out.
    """
    task = priced.task
    layouts = {
        table.name: table.layouts | {"replicas"}
        for module in modules
        for table in module.tables.values()
        if module.has_replicas
    }
    world_size, capacity = task.topology.world_size, task.topology.rank_memory_bytes
    worth = worth_replicating(priced.with_task(task.with_values(layouts=layouts)))
    found: ShardingPlan | None = None
    for table in sorted(task.tables, key=task.topology.table_bytes):
        if table.name not in worth:
            continue
        others = [shard for shard in (found or plan).shards if shard.table != table.name]
        tried = dataclasses.replace(plan, shards=(*others, *Replicas(world_size).shards(table)))
        used = tried.bytes_by_rank(task.topology)
        if all(own <= have for own, have in zip(used, capacity, strict=True)):
            found = tried
    return found
