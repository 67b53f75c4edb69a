"""TorchRec's own planner as a sharder, with all that it can know of a task."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardEstimator, ShardingOption, Storage
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dlrm_sharded.files.errors import (
    ConfigError,
    InfeasibleTaskError,
    InvalidPlanError,
    check_count,
    check_flag,
)
from dlrm_sharded.model.torchrec_adapter import bag_configs, from_torchrec, sequence_configs
from dlrm_sharded.plans.layouts import can_split_rows, trained_layouts
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, MEMORY_KEYS, ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.time_box import TimeBox
from dlrm_sharded.sharders.torchrec_search import TimedEnumerator, TimedSearch

log = logging.getLogger(__name__)

SPLIT_COLUMN_TYPES = [ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value]
ROW_TYPES = {ShardingType.ROW_WISE.value: "rows", ShardingType.TABLE_ROW_WISE.value: "host_rows"}
"""Sharding types that plans can express, besides table-wise and data-parallel ones: all except grid
types. Those of rows have the layout that a table must allow."""

KERNELS = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]
"""Kernels of lookups; TorchRec uses the dense one for data-parallel tables, and for no other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchRecSharder:
    """Calls TorchRec's `EmbeddingShardingPlanner`.

    The planner gets the pooling factors, the memory of each rank (counted as `validate` counts it)
    and the known bandwidths. It estimates costs by itself.

    Args:
        full: whether the planner may also replicate tables and split rows on CPUs, tries the plans
            of TorchRec's dynamic programming, and balances the memory of plans that cost about the
            same. Tables are never replicated on one rank, nor under an optimizer that trains no
            replicas.
        min_partition: smallest width of a column shard; without it TorchRec does not split tables
            of 128 columns or fewer.
        timeout_s: time after which the planner stops looking for better plans, the estimation of
            its options included; it is an error if there is no plan by then.
    """

    name: ClassVar[str] = "torchrec"
    costs: ClassVar[str] = "its own"

    full: bool = False
    min_partition: int = 32
    timeout_s: int = 300

    def __post_init__(self) -> None:
        check_flag("sharder.full", self.full)
        check_count("sharder.min_partition", self.min_partition, least=COLUMN_MULTIPLE)
        if self.min_partition % COLUMN_MULTIPLE:
            raise ConfigError(
                f"sharder.min_partition is {self.min_partition}; it must be a multiple of "
                f"{COLUMN_MULTIPLE}"
            )
        check_count("sharder.timeout_s", self.timeout_s, least=1)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        # TorchRec makes submodules of tables, and their names must not contain a dot.
        names = {f"t{i}": table.name for i, table in enumerate(task.tables)}
        renamed = [
            dataclasses.replace(table, name=alias)
            for alias, table in zip(names, task.tables, strict=True)
        ]
        states = task.topology.optimizer_bytes_by_table
        own = {alias: states[name] for alias, name in names.items() if name in states}
        topology = dataclasses.replace(task.topology, optimizer_bytes_by_table=own)
        search = TimedSearch(TimeBox(self.timeout_s))
        try:
            plan = self._shard(
                dataclasses.replace(task, tables=tuple(renamed), topology=topology), search
            )
        except PlannerError as error:
            raise InfeasibleTaskError(_why_none(task, error, search)) from error
        if search.was_cut:
            log.warning(
                "TorchRec's planner stopped after sharder.timeout_s = %d s with the best of %s "
                "proposals; its plan depends on the speed of this machine",
                self.timeout_s,
                f"{search.num_proposals:,}",
            )
        plan = dataclasses.replace(
            plan, shards=tuple(dataclasses.replace(s, table=names[s.table]) for s in plan.shards)
        )
        try:
            validate(plan, task)
        except InvalidPlanError as error:
            raise InfeasibleTaskError(
                f"TorchRec's planner made a plan that does not fit: {error}"
            ) from error
        return plan

    def _shard(self, task: ShardingTask, search: TimedSearch) -> ShardingPlan:
        bags = _RowWiseOnCpus() if self.full else EmbeddingBagCollectionSharder()
        sharders: list[Any] = [bags, EmbeddingCollectionSharder()]
        logger = logging.getLogger("torchrec")  # which has thousands of lines of INFO
        level = logger.level
        logger.setLevel(level or logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about TorchRec's own defaults
                torchrec_plan = self._planner(task, search).plan(_model(task.tables), sharders)
        finally:
            logger.setLevel(level)
        module_plan: dict[str, ParameterSharding] = {}
        for parameters in torchrec_plan.plan.values():
            module_plan |= cast(dict[str, ParameterSharding], parameters)
        world_size = task.topology.world_size
        return ShardingPlan(world_size, from_torchrec(module_plan, task.tables, world_size))

    def _planner(self, task: ShardingTask, search: TimedSearch) -> EmbeddingShardingPlanner:
        memory = "hbm" if self.full or task.topology.compute_device == "cuda" else "ddr"
        topology = _torchrec_topology(task.topology, memory)
        replicate = self.full and task.can_replicate
        constraints = {
            table.name: ParameterConstraints(
                sharding_types=_sharding_types(table, task.topology, replicate=replicate),
                compute_kernels=KERNELS,
                pooling_factors=[table.pooling_factor / table.num_features] * table.num_features,
                min_partition=(
                    self.min_partition if table.embedding_dim > self.min_partition else None
                ),
            )
            for table in task.tables
        }
        common: dict[str, Any] = {
            "topology": topology,
            "batch_size": max(1, task.batch_size // task.topology.world_size),
            "constraints": constraints,
        }
        estimators = [
            EmbeddingPerfEstimator(topology=topology, constraints=constraints),
            _TableStorage(task.topology, memory),
        ]
        return EmbeddingShardingPlanner(
            **common,
            enumerator=TimedEnumerator(search, **common, estimator=estimators),
            proposer=search.proposers(dynamic_programming=self.full),
            partitioner=MemoryBalancedPartitioner() if self.full else GreedyPerfPartitioner(),
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            debug=False,
        )


class _TableStorage(ShardEstimator):
    """Counts the memory of shards as the task does, so that all sharders obey the same limit.

    TorchRec's own estimate adds input and output buffers, which a task's memory leaves out.
    """

    def __init__(self, topology: Topology, memory: str) -> None:
        self._topology = topology
        self._memory = memory

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        for option in sharding_options:
            replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
            precision = "fp16" if option.tensor.dtype == torch.float16 else "fp32"
            for shard in option.shards:
                num_rows, num_cols = shard.size
                size = self._topology.shard_bytes(
                    option.name, num_rows, num_cols, replicated=replicated, precision=precision
                )
                shard.storage = dataclasses.replace(Storage(hbm=0, ddr=0), **{self._memory: size})


class _RowWiseOnCpus(EmbeddingBagCollectionSharder):
    """Offers the same sharding types on CPUs as on GPUs, because all of them train there, too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


def _model(tables: Sequence[Table]) -> nn.Module:
    """Return the tables as TorchRec modules, sequences as `EmbeddingCollection`s."""
    device, bags = torch.device("meta"), [table for table in tables if table.pooled]
    modules: dict[str, nn.Module] = {}
    if bags:
        modules["bags"] = EmbeddingBagCollection(tables=bag_configs(bags), device=device)
    if len(bags) == len(tables):
        return modules["bags"]
    names = dict.fromkeys(table.module for table in tables if not table.pooled)
    for i, name in enumerate(names):  # a name may have dots, which those of submodules must not
        members = [table for table in tables if table.module == name and not table.pooled]
        configs = sequence_configs(members)
        modules[f"sequences{i}"] = EmbeddingCollection(tables=configs, device=device)
    return nn.ModuleDict(modules)


def _sharding_types(table: Table, topology: Topology, *, replicate: bool = False) -> list[str]:
    """Return the types that FBGEMM can train: not table-wise if the whole table is too wide."""
    split_types = SPLIT_COLUMN_TYPES if "columns" in trained_layouts(table, topology) else []
    if table.embedding_dim > topology.max_shard_columns:
        return split_types
    types = [ShardingType.TABLE_WISE.value, *split_types]
    if can_split_rows(table, topology):
        types += [
            kind for kind, layout in ROW_TYPES.items() if layout in trained_layouts(table, topology)
        ]
    if replicate and topology.world_size > 1 and "replicas" in trained_layouts(table, topology):
        types.append(ShardingType.DATA_PARALLEL.value)
    return types


def _torchrec_topology(topology: Topology, memory: str) -> TorchRecTopology:
    """Return TorchRec's topology with all known figures; its bandwidths are in bytes per ms.

    Args:
        memory: "hbm" or "ddr", the kind as which the memory of ranks counts; TorchRec's dynamic
            programming and its balancing of memory support only "hbm".
    """
    within, between = topology.intra_host_bytes_per_s, topology.inter_host_bytes_per_s
    stated = {"intra_host_bw": within, "inter_host_bw": between}
    known: dict[str, Any] = {key: of / 1e3 for key, of in stated.items() if of is not None}
    torchrec_topology = TorchRecTopology(
        world_size=topology.world_size,
        local_world_size=topology.ranks_per_host,
        compute_device=topology.compute_device,
        **known,
    )
    # Not as CustomTopologyData: TorchRec would cut rows into blocks in proportion to the memory,
    # which it does not train.
    devices = torchrec_topology.devices
    for device, memory_bytes in zip(devices, topology.rank_memory_bytes, strict=True):
        device.storage = dataclasses.replace(device.storage, **{memory: memory_bytes})
    return torchrec_topology


def _why_none(task: ShardingTask, error: PlannerError, search: TimedSearch) -> str:
    if search.was_cut:
        return (
            f"TorchRec's planner found no plan that fits within sharder.timeout_s = "
            f"{search.box.limit_s:g} s, in {search.num_proposals:,} proposals; raise "
            "sharder.timeout_s, or use sharder=search"
        )
    topology = task.topology
    largest = max(task.tables, key=topology.table_bytes)
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
    return (
        f"TorchRec's planner found no plan ({reason}). Largest table: {largest.name!r} with "
        f"{topology.table_bytes(largest):,} B; all tables: {task.table_bytes / GIB:.2f} GiB on "
        f"{topology.world_size} ranks of {topology.rank_memory_text}, each all free; "
        f"add ranks or memory ({MEMORY_KEYS})"
    )
