"""Plans TorchRec models of any kind with any sharder."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingPlanner as TorchRecPlanner

from dlrm_sharded.commands.sharders import make_planner
from dlrm_sharded.cost.base import CostModel, caveat_of, is_additive
from dlrm_sharded.drop_in.dedup import check_dedup, deduplicating_modules
from dlrm_sharded.drop_in.find_tables import find_tables
from dlrm_sharded.drop_in.fixed_tables import SharderBesideFixed
from dlrm_sharded.drop_in.measured_data import KjtsOf, measured
from dlrm_sharded.drop_in.model_report import ModelReport, replica_gain
from dlrm_sharded.drop_in.module_tables import ModuleTables
from dlrm_sharded.drop_in.optimizer_state import optimizer_of_tables, with_optimizer_state
from dlrm_sharded.drop_in.parameter_constraints import Means, constrained, passed_on
from dlrm_sharded.drop_in.prices import context_of_ranks, prices_of_run
from dlrm_sharded.drop_in.replica_training import fused_rules, rules_of_replicas, with_replicable
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.fitting.picture import AUTO
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.model.torchrec_adapter import parameter_sharding
from dlrm_sharded.plans.layouts import layout_of
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.distributed import (
    detect_topology,
    rank_from_environment,
    with_memory_of_all_ranks,
)
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.sharders.planning import Diagnose, Planner

log = logging.getLogger(__name__)

DEFAULT_LOCAL_BATCH_SIZE = 512
"""Samples per rank that TorchRec's planner assumes by default."""


class ShardedPlanner(TorchRecPlanner):
    """Replaces TorchRec's `EmbeddingShardingPlanner` and plans with any sharder.

    It plans the tables of all modules of a model together. Each table lies only where its module's
    TorchRec sharder trains it. Tables that train in row blocks alone, as those with managed
    collisions do, lie in row blocks on all ranks, and the sharder places the others beside them.

    A table with a fused optimizer (`apply_optimizer_in_backward`) would leave it as a replica:
    TorchRec then trains it by the dense optimizer, if that has its parameter at all. So no table is
    replicated unless `replicas` or a constraint asks for it, and a fused one only if its optimizer
    is plain SGD or row-wise Adagrad: `report.replica_optimizer(model)` returns an optimizer that
    updates replicas alike. For replicas without a fused optimizer, fuse it into the tables that the
    plan shards, and give the dense optimizer the same rule and rate for those that it calls
    `data_parallel`.

    The attribute `report` is the `ModelReport` of the last plan, whose text is logged; None before.

    Args:
        sharder: a name in conf/sharder, or any sharder.
        topology: ranks of the model; by default those of this job, with their free memory. The
            state of optimizers that are fused into the tables counts as memory in either case.
        batch_size: samples of one rank, as in TorchRec; 512 by default.
        global_batch_size: samples of all ranks together, in the place of `batch_size`.
        data: batches of one rank, KeyedJaggedTensors or anything with some inside, from which
            pooling factors and access profiles are measured: as many as a global batch takes. In
            `collective_plan`, those of rank 0 are read. An iterator loses the batches that it
            yields here, and a DataLoader does not.
        kjts_of: returns the KeyedJaggedTensors of a batch, or a mapping from paths of modules to
            theirs; None if they can be found in the batch.
        max_batches: limit on the batches that are read.
        pooling_factors: mean ids per sample by table name, or a list with one mean for each feature
            of the table; 1 for tables that are missing.
        constraints: TorchRec's, by table name. Each field is kept, or refused by a ConfigError.
        replicas: whether tables may be replicated.
        cost_model: prices of the search and of `report`. "auto" finds those of this hardware as a
            run does, corrected by its journal of runs, unless the sharder has some; None for none.
        plan: plan.json of an earlier plan, which is taken in the place of a new one.
        output_dir: folder for plan.json and task.json; None writes neither.
        options: keys of the sharder's yaml, such as `time_budget_s=5`, for one that is named.
    """

    def __init__(
        self,
        sharder: str | Sharder = "neuroshard",
        *,
        topology: Topology | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        data: Iterable[Any] | None = None,
        kjts_of: KjtsOf | None = None,
        max_batches: int | None = None,
        pooling_factors: Means | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        replicas: bool = False,
        cost_model: CostModel | str | None = AUTO,
        plan: str | Path | None = None,
        output_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        if batch_size is not None and global_batch_size is not None:
            raise ConfigError("batch_size and global_batch_size are both given; give one of them")
        for key, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
            if size is not None:
                check_count(key, size, least=1)
        if isinstance(cost_model, str) and cost_model != AUTO:
            raise ConfigError(f"cost_model is {cost_model!r}; give {AUTO!r}, a cost model or None")
        if options and (plan is not None or not isinstance(sharder, str)):
            raise ConfigError(
                f"ShardedPlanner has no argument {min(options)!r}, and only a sharder that is "
                "named takes options"
            )
        self.sharder = sharder if plan is None else PlanFileSharder(plan)
        self.topology = topology
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.data = data
        self.kjts_of = kjts_of
        self.max_batches = max_batches
        self.pooling_factors = pooling_factors or {}
        self.constraints = constraints or {}
        self.replicas = replicas
        self.cost_model = cost_model
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.options = options
        self.report: ModelReport | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> TorchRecPlan:
        """Plan the modules that `sharders` can shard.

        Raises:
            ConfigError: there is no such module, or one that cannot be planned.
            ShardingError: there is no plan, or the module does not train the sharder's.
        """
        topology = self.topology or detect_topology()
        plan, self.report = self._plan(module, sharders, topology, None)
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
        context = None
        if self._needs_prices and pg in (None, dist.GroupMember.WORLD):
            rank = rank_from_environment()
            if topology.compute_device == rank.device.type:
                context = context_of_job(rank, None)
        plan, self.report = on_rank_zero(
            lambda: self._plan(module, chosen, topology, context), group=pg
        )
        return plan

    def _plan(
        self,
        model: nn.Module,
        sharders: list[ModuleSharder[Any]],
        topology: Topology,
        context: RunContext | None,
    ) -> tuple[TorchRecPlan, ModelReport]:
        """Plan a model on ranks of a kind.

        Args:
            context: what the ranks compute on, if all of them have detected it.
        """
        started_s = time.perf_counter()
        batch_size = self.global_batch_size
        if batch_size is None:
            batch_size = (self.batch_size or DEFAULT_LOCAL_BATCH_SIZE) * topology.world_size
        found = find_tables(model, sharders, topology)
        topology = with_optimizer_state(topology, model, sharders, found)
        rules = fused_rules(model, sharders, found)
        tables = constrained(
            with_replicable(found, rules),
            topology,
            batch_size / topology.world_size,
            means=self.pooling_factors,
            constraints=self.constraints,
            replicas=self.replicas,
        )
        modules = tables.modules
        if self.data is not None:
            modules = measured(
                modules,
                self.data,
                batch_size,
                kjts_of=self.kjts_of,
                max_batches=self.max_batches,
            )
        task = ShardingTask(
            tables=tuple(table for found in modules for table in found.tables.values()),
            topology=topology,
            batch_size=batch_size,
        )
        if self._needs_prices:
            optimizer = optimizer_of_tables(model, sharders)
            context = self._context(context, topology, optimizer)
        dedup = deduplicating_modules(model, sharders)
        planner = dataclasses.replace(self._planner(context), dedup=dedup)
        self._warn_of_other_device(planner, topology)
        if tables.fixed or tables.min_columns:
            beside = SharderBesideFixed(planner.sharder, tables.fixed, tables.min_columns)
            planner = dataclasses.replace(planner, sharder=beside)
        plan, details = planner.plan(task)
        check_dedup(plan, dedup)
        torchrec_plan = TorchRecPlan(
            {found.path: _module_plan(found, plan, topology, self.constraints) for found in modules}
        )
        if not plan.exchange_precision.is_exact:
            log.warning(
                "the plan is for exchanges in %s, which a TorchRec plan does not carry; give the "
                "sharders a qcomm_codecs_registry of that precision",
                plan.exchange_precision,
            )
        gain = None
        if is_additive(planner.cost_model) and not self.replicas:
            priced = planner.cost_model.price(task, plan.exchange_precision)
            gain = replica_gain(plan, tables.replicable, priced)
        plan_s = time.perf_counter() - started_s
        report = ModelReport(
            task,
            plan,
            details,
            replica_gain=gain,
            may_replicate=self.replicas or bool(plan.replicated_tables),
            plan_s=plan_s,
            replica_rules=rules_of_replicas(plan, modules, rules),
            table_names={
                (found.path, parameter): table.name
                for found in modules
                for parameter, table in found.tables.items()
            },
        )
        if self.output_dir is not None:
            report = report.write(self.output_dir)
        log.info("%s", report)
        return torchrec_plan, report

    def _context(
        self, detected: RunContext | None, topology: Topology, optimizer: str | None
    ) -> RunContext:
        """Return what the ranks compute on, for prices."""
        return context_of_ranks(detected, topology, optimizer)

    @property
    def _needs_prices(self) -> bool:
        """Return whether the prices of this hardware have to be found."""
        return self.cost_model == AUTO and self._sharders_model is None

    @property
    def _sharders_model(self) -> CostModel | None:
        """The cost model of a sharder that was given as an object; None if it has none."""
        model: CostModel | None = getattr(
            getattr(self.sharder, "context", None), "cost_model", None
        )
        return model

    def _planner(self, context: RunContext | None) -> Planner:
        """Return the planner of runs, with prices as a run finds them."""
        model = self.cost_model
        if self._needs_prices:
            assert context is not None
            model = prices_of_run(context)
        elif model == AUTO:
            model = self._sharders_model
        assert not isinstance(model, str)
        explain: Diagnose = functools.partial(diagnose, alternatives=False)
        if isinstance(self.sharder, str):
            return make_planner(self.sharder, model, run=context, diagnose=explain, **self.options)
        return Planner(self.sharder, model, explain)

    def _warn_of_other_device(self, planner: Planner, topology: Topology) -> None:
        """Warn if the prices of the sharder or of the report are those of another device."""
        caveats = {
            caveat_of(model, topology) for model in (self._sharders_model, planner.cost_model)
        }
        for caveat in caveats - {None}:
            log.warning(
                "%s; for these ranks, make context and prices with RunContext(device=%r)",
                caveat,
                topology.compute_device,
            )


def plan_model(
    model: nn.Module,
    sharder: str | Sharder = "neuroshard",
    *,
    sharders: list[ModuleSharder[Any]] | None = None,
    pg: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[TorchRecPlan, ModelReport]:
    """Plan a TorchRec model; return the plan for `DistributedModelParallel` and a report on it.

    All ranks of a job call it together. Without a process group, this process plans alone.

    Args:
        sharders: TorchRec's sharders of the modules; its default ones if None.
        pg: ranks of the model; all ranks of the job if None.
        options: arguments of `ShardedPlanner`.

    Raises:
        ConfigError, ShardingError: as `ShardedPlanner.plan`.
    """
    planner = ShardedPlanner(sharder, **options)
    if dist.is_initialized():
        plan = planner.collective_plan(model, sharders, pg)
    else:
        plan = planner.plan(model, get_default_sharders() if sharders is None else sharders)
    assert planner.report is not None
    return plan, planner.report


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
