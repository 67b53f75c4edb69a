"""Plans TorchRec models of any kind with any sharder."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingPlanner as TorchRecPlanner

from dlrm_sharded.calibration.hardware_costs import AUTO, MAX_S, hardware_cost_model
from dlrm_sharded.commands.sharders import make_planner
from dlrm_sharded.cost.base import CostModel, caveat_of
from dlrm_sharded.cost.cost_model_file import cost_model_beside, write_cost_model
from dlrm_sharded.drop_in.find_tables import find_tables
from dlrm_sharded.drop_in.job_ranks import check_topology, rank_in_group
from dlrm_sharded.drop_in.measured_data import KjtsOf, with_measured_accesses
from dlrm_sharded.drop_in.model_plan import ModelTask
from dlrm_sharded.drop_in.model_report import ModelReport
from dlrm_sharded.drop_in.optimizer_state import optimizer_of_tables, with_optimizer_state
from dlrm_sharded.drop_in.parameter_constraints import Means, constrained
from dlrm_sharded.drop_in.run_costs import context_of_topology, journal_of_user
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.hardware.torch_defaults import torch_defaults
from dlrm_sharded.job.first_measurement import with_measured_costs
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.device_memory import with_memory_of_all_ranks
from dlrm_sharded.ranks.distributed import detect_topology
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.plan_file import PlanFileSharder
from dlrm_sharded.sharders.planning import Diagnose, Planner

log = logging.getLogger(__name__)

DEFAULT_LOCAL_BATCH_SIZE = 512
"""Samples per rank that TorchRec's planner assumes by default."""


class ShardedPlanner(TorchRecPlanner):
    """Replaces TorchRec's `EmbeddingShardingPlanner` and plans with any sharder.

    It plans the tables of all modules of a model together. Each table has a layout that its
    module's TorchRec sharder trains. Tables that train only in row blocks, such as those with
    managed collisions, lie in row blocks on all ranks, and the sharder places the others.

    A replica does not use the fused optimizer of its table (`apply_optimizer_in_backward`):
    TorchRec trains it with the dense optimizer, if that has its parameter at all. So a table is
    replicated only if its constraint, or its TorchRec sharder, allows nothing but `data_parallel`.
    Give such a table the update rule and learning rate of the others in the dense optimizer.

    The attribute `report` is the `ModelReport` of the last plan, whose text is logged; None before.

    Args:
        sharder: a name in conf/sharder, or any sharder.
        topology: ranks of the model; by default those of this job, with their free memory.
            `collective_plan` refuses one with other ranks, hosts or devices than the job's. The
            state of optimizers that are fused into the tables counts as memory in either case.
        batch_size: samples of one rank, as in TorchRec; 512 by default.
        global_batch_size: samples of all ranks together, instead of `batch_size`.
        data: one batch of a rank, or a list or loader of them: KeyedJaggedTensors or anything with
            some inside. As many as make a global batch are read, to measure pooling factors and
            access profiles; `collective_plan` reads those of rank 0. An iterator loses the batches
            that it yields here, and a DataLoader does not.
        kjts_of: returns the KeyedJaggedTensors of a batch, or a mapping from paths of modules to
            theirs; None if they can be found in the batch.
        max_batches: limit on the batches that are read.
        pooling_factors: mean ids per sample by table name, or a list with one mean for each feature
            of the table; for other tables, those of the constraints, or 1. Not used with `data`.
        constraints: TorchRec's, by table name. Each field is kept, or refused by a ConfigError.
        cost_model: cost model of the search and of `report`. "auto" is the sharder's own, or else
            the one of this hardware as a run finds it; None for none.
        calibrate: seconds in which `collective_plan` measures this hardware, once, if the plan
            depends on costs and nothing was measured here; 20 are enough. None measures nothing.
        plan: plan.json of an earlier plan, which is used instead of a new one.
        output_dir: folder for plan.json, its cost model and task.json; None writes none.
        options: keys of the sharder's yaml, such as `time_budget_s=5`, for one that is named.

    Raises:
        ConfigError: an argument cannot be used, or two contradict each other.
    """

    def __init__(
        self,
        sharder: str | Sharder = "search",
        *,
        topology: Topology | None = None,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        data: Any = None,
        kjts_of: KjtsOf | None = None,
        max_batches: int | None = None,
        pooling_factors: Means | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        cost_model: CostModel | str | None = AUTO,
        calibrate: float | None = None,
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
        if calibrate is not None:
            check_number("calibrate", calibrate, above=True, most=MAX_S)
        if options and (plan is not None or not isinstance(sharder, str)):
            what = "sharder is an object" if plan is None else "plan is given"
            raise ConfigError(f"{what}, so {min(options)!r} has no effect; leave one of them out")
        if isinstance(plan, TorchRecPlan):
            raise ConfigError("plan is a plan of TorchRec; give the path of a plan.json")
        if not isinstance(topology, Topology | None):
            name = type(topology).__name__
            raise ConfigError(f"topology is of type {name}; give a dlrm_sharded.Topology")
        for key, given in (("pooling_factors", pooling_factors), ("constraints", constraints)):
            if not isinstance(given, Mapping | None):
                name = type(given).__name__
                raise ConfigError(f"{key} is of type {name}; give a dict by table name")
        self.sharder = sharder if plan is None else PlanFileSharder(plan)
        context = getattr(self.sharder, "context", None)
        self._sharders_model: CostModel | None = getattr(context, "cost_model", None)
        self.topology = topology
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.data = data
        self.kjts_of = kjts_of
        self.max_batches = max_batches
        self.pooling_factors = pooling_factors or {}
        self.constraints = constraints or {}
        self.cost_model = cost_model
        if cost_model == AUTO and self._sharders_model is not None:
            self.cost_model = self._sharders_model
        self.calibrate = calibrate
        self.output_dir = None if output_dir is None else Path(output_dir)
        self.options = options
        self.report: ModelReport | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> TorchRecPlan:
        """Plan the modules that `sharders` can shard.

        Raises:
            ConfigError: there is no such module, or one that cannot be planned.
            DataError: the accesses in `data` cannot be measured.
            ShardingError: there is no plan, or a module does not train the sharder's plan.
        """
        task = self._task(module, sharders, self.topology or detect_topology())
        plan, self.report = self._planned(task, self._planner(task))
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

        Raises:
            ConfigError, DataError, ShardingError: as `plan`, or the topology is not the job's.
        """
        chosen = get_default_sharders() if sharders is None else sharders
        rank = rank_in_group(pg)
        with all_or_none(group=pg):
            topology = self.topology or detect_topology(group=pg, rank=rank)
            check_topology(topology, rank, group=pg)
        if self.topology is None:
            topology = with_memory_of_all_ranks(topology, group=pg)
        task = on_rank_zero(lambda: self._task(module, chosen, topology), group=pg)
        context = None
        if self.cost_model == AUTO and pg in (None, dist.GroupMember.WORLD):
            context = context_of_job(rank, task.optimizer)
        with all_or_none(group=pg):
            planner = self._planner(task, context) if dist.get_rank(pg) == 0 else None
        if context is not None and self.calibrate is not None and task.optimizer is None:
            log.warning(
                "calibrate measures nothing: no optimizer is fused into the tables, see "
                "apply_optimizer_in_backward"
            )
        elif context is not None:
            planner = with_measured_costs(
                planner,
                rank,
                context,
                task.task,
                budget_s=self.calibrate,
                journal=journal_of_user(),
                new_planner=lambda measured: self._planner(task, measured),
            )

        def plan() -> tuple[TorchRecPlan, ModelReport]:
            assert planner is not None, "rank 0 has one"
            return self._planned(task, planner)

        torchrec_plan, self.report = on_rank_zero(plan, group=pg)
        return torchrec_plan

    def _task(
        self, model: nn.Module, sharders: list[ModuleSharder[Any]], topology: Topology
    ) -> ModelTask:
        """Find the tables of a model, and measure their accesses.

        Raises:
            ConfigError: there is no module to plan, or one that cannot be planned.
            DataError: the accesses cannot be measured.
        """
        batch_size = self.global_batch_size
        if batch_size is None:
            batch_size = (self.batch_size or DEFAULT_LOCAL_BATCH_SIZE) * topology.world_size
        found = find_tables(model, sharders, topology)
        tables = constrained(
            found,
            topology,
            batch_size / topology.world_size,
            means=self.pooling_factors,
            constraints=self.constraints,
        )
        task = ShardingTask(
            tables=tuple(table for module in tables.modules for table in module.tables.values()),
            topology=with_optimizer_state(topology, found),
            batch_size=batch_size,
        )
        stated = {key for key, own in self.constraints.items() if own.pooling_factors != [1.0]}
        names = {name for module in tables.modules for name in module.tables}
        if self.data is None and (assumed := names - stated - self.pooling_factors.keys()):
            text = f"{len(assumed)} of {len(names)} tables"
            log.warning("pooling factors of %s are taken as 1; give data or pooling_factors", text)
        if self.data is not None:
            if self.pooling_factors:
                log.warning("pooling_factors are not used, because data measures them")
            task = with_measured_accesses(
                task, tables.modules, self.data, kjts_of=self.kjts_of, max_batches=self.max_batches
            )
        return ModelTask(task, tables, optimizer_of_tables(found))

    @torch_defaults()
    def _planner(self, task: ModelTask, context: RunContext | None = None) -> Planner:
        """Return the planner of runs, with costs as a run finds them.

        Args:
            context: what the ranks compute on; if it is None, this process finds it where needed.
        """
        model = self.cost_model
        if isinstance(model, str):
            context = context or context_of_topology(task.task.topology, task.optimizer)
            model = hardware_cost_model(context, journal=journal_of_user())
        explain: Diagnose = functools.partial(diagnose, alternatives=False)
        if isinstance(self.sharder, str):
            return make_planner(self.sharder, model, run=context, diagnose=explain, **self.options)
        return Planner(self.sharder, model, explain)

    @torch_defaults()
    def _planned(self, task: ModelTask, planner: Planner) -> tuple[TorchRecPlan, ModelReport]:
        """Return a planner's plan in TorchRec's form, and the report on it, which is logged."""
        topology = task.task.topology
        models = self._sharders_model, planner.cost_model
        for caveat in {caveat_of(model, topology) for model in models} - {None}:
            log.warning(
                "%s; for these ranks, make context and cost model with RunContext(device=%r)",
                caveat,
                topology.compute_device,
            )
        plan, details = task.plan(planner)
        torchrec_plan = task.torchrec_plan(plan, self.constraints)
        if not plan.exchange_precision.is_exact:
            log.warning(
                "the plan is for exchanges in %s, which a TorchRec plan does not carry; give the "
                "sharders a qcomm_codecs_registry of that precision",
                plan.exchange_precision,
            )
        report = ModelReport(task.task, plan, details)
        if self.output_dir is not None:
            report = report.write(self.output_dir)
            write_cost_model(cost_model_beside(report.files[0]), planner.cost_model)
        log.info("%s", report)
        return torchrec_plan, report


def plan_model(
    model: nn.Module,
    sharder: str | Sharder = "search",
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
        ConfigError, DataError, ShardingError: as `ShardedPlanner.plan`.
    """
    planner = ShardedPlanner(sharder, **options)
    if dist.is_initialized():
        plan = planner.collective_plan(model, sharders, pg)
    else:
        plan = planner.plan(model, get_default_sharders() if sharders is None else sharders)
    assert planner.report is not None
    return plan, planner.report
