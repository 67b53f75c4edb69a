"""Plans TorchRec models of any kind with any sharder."""

from __future__ import annotations

import functools
import logging
import time
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

from dlrm_sharded.calibration.hardware_costs import AUTO, MAX_START_S
from dlrm_sharded.commands.sharders import make_planner
from dlrm_sharded.cost.base import CostModel, caveat_of, price
from dlrm_sharded.drop_in.job_ranks import check_topology, rank_in_group
from dlrm_sharded.drop_in.measured_data import KjtsOf, measured
from dlrm_sharded.drop_in.model_report import ModelReport, replica_gain
from dlrm_sharded.drop_in.model_request import ModelRequest, model_request
from dlrm_sharded.drop_in.optimizer_state import optimizer_of_tables
from dlrm_sharded.drop_in.parameter_constraints import Means, constrained
from dlrm_sharded.drop_in.prices import context_of_ranks, prices_of_run
from dlrm_sharded.explain.diagnosis import diagnose
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.hardware.torch_defaults import torch_defaults
from dlrm_sharded.job.first_start import with_first_start
from dlrm_sharded.plans.plan import with_precisions
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.distributed import (
    Rank,
    detect_topology,
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
    TorchRec then trains it by the dense optimizer, if that has its parameter at all. So a table is
    replicated only if its constraint, or its TorchRec sharder, allows nothing but `data_parallel`.
    Give the dense optimizer the rule and rate of the other tables for it.

    The attribute `report` is the `ModelReport` of the last plan, whose text is logged; None before.

    Args:
        sharder: a name in conf/sharder, or any sharder.
        topology: ranks of the model; by default those of this job, with their free memory.
            `collective_plan` refuses one of other ranks, hosts or devices than the job's. The
            state of optimizers that are fused into the tables counts as memory in either case.
        batch_size: samples of one rank, as in TorchRec; 512 by default.
        global_batch_size: samples of all ranks together, in the place of `batch_size`.
        data: one batch of a rank, or a list or loader of them: KeyedJaggedTensors or anything with
            some inside, from which pooling factors and access profiles are measured: as many as a
            global batch takes. In `collective_plan`, those of rank 0 are read. An iterator loses
            the batches that it yields here, and a DataLoader does not.
        kjts_of: returns the KeyedJaggedTensors of a batch, or a mapping from paths of modules to
            theirs; None if they can be found in the batch.
        max_batches: limit on the batches that are read.
        pooling_factors: mean ids per sample by table name, or a list with one mean for each feature
            of the table; 1 for tables that are missing.
        constraints: TorchRec's, by table name. Each field is kept, or refused by a ConfigError.
        cost_model: prices of the search and of `report`. "auto" finds those of this hardware as a
            run does, corrected by its journal of runs, unless the sharder has some; None for none.
        calibrate: seconds in which `collective_plan` measures this hardware, once, if the plan
            depends on prices and it has none of its own; 20 suffice. None measures nothing.
        plan: plan.json of an earlier plan, which is taken in the place of a new one.
        output_dir: folder for plan.json and task.json; None writes neither.
        options: keys of the sharder's yaml, such as `time_budget_s=5`, for one that is named.
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
            check_number("calibrate", calibrate, above=True, most=MAX_START_S)
        if "replicas" in options:
            raise ConfigError(
                "replicas is not there since 0.3: constrain tables to data_parallel, and let the "
                "dense optimizer train them"
            )
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
        self.cost_model = cost_model
        self.calibrate = calibrate
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

        Raises:
            ConfigError, ShardingError: as `plan`, or the topology is not the job's.
        """
        chosen = get_default_sharders() if sharders is None else sharders
        rank = rank_in_group(pg)
        with all_or_none(group=pg):
            topology = self.topology or detect_topology(group=pg, rank=rank)
            check_topology(topology, rank, group=pg)
        if self.topology is None:
            topology = with_memory_of_all_ranks(topology, group=pg)
        context = None
        if self._needs_prices and pg in (None, dist.GroupMember.WORLD):
            context = context_of_job(rank, None)
            if self.calibrate is not None:
                return self._plan_after_start(module, chosen, topology, context, rank)
        plan, self.report = on_rank_zero(
            lambda: self._plan(module, chosen, topology, context), group=pg
        )
        return plan

    def _plan_after_start(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        topology: Topology,
        context: RunContext,
        rank: Rank,
    ) -> TorchRecPlan:
        """Plan as `collective_plan`, after a first start on hardware without prices of its own."""
        optimizer = optimizer_of_tables(module, sharders)
        requests: list[ModelRequest] = []  # of rank 0

        def request() -> ShardingTask:
            requests.append(self._request(module, sharders, topology))
            return requests[0].task

        task = on_rank_zero(request)
        context = context_of_ranks(context, task.topology, optimizer)
        with all_or_none():
            planner = self._planner(context) if rank.is_zero else None
        if optimizer is None:
            log.warning(
                "calibrate measures nothing: no optimizer is fused into the tables, see "
                "apply_optimizer_in_backward"
            )
        else:
            planner = with_first_start(
                planner,
                rank,
                context,
                task,
                budget_s=self.calibrate,
                new_planner=self._planner,
            )

        def plan() -> tuple[TorchRecPlan, ModelReport]:
            assert planner is not None, "rank 0 has one"
            return self._planned(requests[0], planner)

        torchrec_plan, self.report = on_rank_zero(plan)
        return torchrec_plan

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
        request = self._request(model, sharders, topology)
        if self._needs_prices:
            optimizer = optimizer_of_tables(model, sharders)
            context = context_of_ranks(context, request.task.topology, optimizer)
        return self._planned(request, self._planner(context))

    def _request(
        self, model: nn.Module, sharders: list[ModuleSharder[Any]], topology: Topology
    ) -> ModelRequest:
        """Find the tables of a model, and measure their accesses."""
        batch_size = self.global_batch_size
        if batch_size is None:
            batch_size = (self.batch_size or DEFAULT_LOCAL_BATCH_SIZE) * topology.world_size
        measure = None
        if self.data is not None:
            measure = functools.partial(
                measured,
                data=self.data,
                batch_size=batch_size,
                kjts_of=self.kjts_of,
                max_batches=self.max_batches,
            )
        return model_request(
            model,
            sharders,
            topology,
            batch_size=batch_size,
            constrain=functools.partial(
                constrained,
                means=self.pooling_factors,
                constraints=self.constraints,
            ),
            measure=measure,
        )

    @torch_defaults()
    def _planned(self, request: ModelRequest, planner: Planner) -> tuple[TorchRecPlan, ModelReport]:
        """Return the plan of a request."""
        started_s = time.perf_counter() - request.seconds
        self._warn_of_other_device(planner, request.task.topology)
        request, plan, details = request.planned(planner)
        task, tables = request.task, request.tables
        torchrec_plan = request.torchrec_plan(plan, self.constraints)
        if not plan.exchange_precision.is_exact:
            log.warning(
                "the plan is for exchanges in %s, which a TorchRec plan does not carry; give the "
                "sharders a qcomm_codecs_registry of that precision",
                plan.exchange_precision,
            )
        gain = None
        priced = price(planner.cost_model, with_precisions(task, plan))
        if priced is not None:
            gain = replica_gain(plan, tables.replicable, priced)
        plan_s = time.perf_counter() - started_s
        report = ModelReport(
            task,
            plan,
            details,
            replica_gain=gain,
            deduplicating=request.deduplicating,
            plan_s=plan_s,
        )
        if self.output_dir is not None:
            report = report.write(self.output_dir)
        log.info("%s", report)
        return torchrec_plan, report

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

    @torch_defaults()
    def _planner(self, context: RunContext | None) -> Planner:
        """Return the planner of runs, with prices as a run finds them."""
        model = self.cost_model
        if self._needs_prices:
            assert context is not None
            model = prices_of_run(context, self.calibrate)
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
        ConfigError, ShardingError: as `ShardedPlanner.plan`.
    """
    planner = ShardedPlanner(sharder, **options)
    if dist.is_initialized():
        plan = planner.collective_plan(model, sharders, pg)
    else:
        plan = planner.plan(model, get_default_sharders() if sharders is None else sharders)
    assert planner.report is not None
    return plan, planner.report
