"""TorchRec's own planner as a sharder, with all figures of the task or with its defaults."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    PlannerError,
    ShardEstimator,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError, InvalidPlanError, check_count
from dlrm_sharded.layouts import can_split_rows
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import GIB, MEMORY_KEYS, ShardingTask, Topology
from dlrm_sharded.torchrec_adapter import bag_configs, from_torchrec
from dlrm_sharded.validation import validate

SPLIT_COLUMN_TYPES = [ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value]
COLUMN_TYPES = [ShardingType.TABLE_WISE.value, *SPLIT_COLUMN_TYPES]
ROW_TYPES = [ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value]
"""Sharding types that plans can express: all except data-parallel and grid types."""


class TorchRecSharder:
    """Calls TorchRec's `EmbeddingShardingPlanner`.

    Args:
        informed: if true, the planner gets the pooling factors, the memory of each rank (counted as
            `validate` counts it) and the known bandwidths, and may split columns down to
            `min_partition`. If false, it gets the world size, the device type and the batch size,
            and defaults for all else, as in `dlrm_main.py` of the DLRM reference.
        min_partition: smallest width of a column shard; without it TorchRec does not split tables
            of 128 columns or fewer.
        timeout_s: the planner stops looking for better plans after this time.
    """

    def __init__(
        self, *, informed: bool = True, min_partition: int = 32, timeout_s: int = 300
    ) -> None:
        check_count("sharder.min_partition", min_partition, least=COLUMN_MULTIPLE)
        if min_partition % COLUMN_MULTIPLE:
            raise ConfigError(
                f"sharder.min_partition is {min_partition}, must be a multiple of {COLUMN_MULTIPLE}"
            )
        check_count("sharder.timeout_s", timeout_s, least=1)
        self.name = "torchrec" if informed else "torchrec_blind"
        self._informed = informed
        self._min_partition = min_partition
        self._timeout_s = timeout_s

    def shard(self, task: ShardingTask) -> ShardingPlan:
        # TorchRec makes submodules of tables, and their names must not contain a dot.
        names = {f"t{i}": table.name for i, table in enumerate(task.tables)}
        renamed = [
            dataclasses.replace(table, name=alias)
            for alias, table in zip(names, task.tables, strict=True)
        ]
        try:
            plan = self._shard(dataclasses.replace(task, tables=tuple(renamed)))
        except PlannerError as error:
            raise InfeasibleTaskError(_why_none(task, error)) from error
        plan = dataclasses.replace(
            plan,
            shards=tuple(dataclasses.replace(s, table=names[s.table]) for s in plan.shards),
        )
        try:
            validate(plan, task)
        except InvalidPlanError as error:
            raise InfeasibleTaskError(
                f"TorchRec's planner made a plan that does not fit: {error}"
            ) from error
        return plan

    def _shard(self, task: ShardingTask) -> ShardingPlan:
        collection = EmbeddingBagCollection(
            tables=bag_configs(task.tables), device=torch.device("meta")
        )
        make_planner = self._informed_planner if self._informed else self._blind_planner
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchRec's own defaults
            torchrec_plan = make_planner(task).plan(collection, [EmbeddingBagCollectionSharder()])
        module_plan: Any = torchrec_plan.plan[""]
        return ShardingPlan(task.topology.world_size, from_torchrec(module_plan))

    def _informed_planner(self, task: ShardingTask) -> EmbeddingShardingPlanner:
        topology = _torchrec_topology(task.topology)
        constraints = {
            table.name: ParameterConstraints(
                sharding_types=_sharding_types(table, task.topology),
                compute_kernels=[EmbeddingComputeKernel.FUSED.value],
                pooling_factors=[table.pooling_factor],
                min_partition=self._min_partition
                if table.embedding_dim > self._min_partition
                else None,
            )
            for table in task.tables
        }
        local_batch_size = max(1, task.batch_size // task.topology.world_size)
        return EmbeddingShardingPlanner(
            topology=topology,
            batch_size=local_batch_size,
            constraints=constraints,
            enumerator=EmbeddingEnumerator(
                topology=topology,
                batch_size=local_batch_size,
                constraints=constraints,
                estimator=[
                    EmbeddingPerfEstimator(topology=topology, constraints=constraints),
                    _TableStorage(task.topology),
                ],
            ),
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            debug=False,
            timeout_seconds=self._timeout_s,
        )

    def _blind_planner(self, task: ShardingTask) -> EmbeddingShardingPlanner:
        return EmbeddingShardingPlanner(
            topology=TorchRecTopology(
                world_size=task.topology.world_size,
                local_world_size=task.topology.ranks_per_host,
                compute_device=task.topology.compute_device,
            ),
            batch_size=max(1, task.batch_size // task.topology.world_size),
            storage_reservation=HeuristicalStorageReservation(percentage=0.05),
            constraints={
                table.name: ParameterConstraints(
                    sharding_types=_sharding_types(table, task.topology),
                    compute_kernels=[EmbeddingComputeKernel.FUSED.value],
                )
                for table in task.tables
            },
            debug=False,
            timeout_seconds=self._timeout_s,
        )


class _TableStorage(ShardEstimator):
    """Counts the memory of shards as the task does, so that all sharders obey the same limit.

    TorchRec's own estimate adds input and output buffers, which a task's memory leaves out.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        on_cpu = self._topology.compute_device == "cpu"
        for option in sharding_options:
            for shard in option.shards:
                num_rows, num_cols = shard.size
                size = self._topology.shard_bytes(num_rows, num_cols)
                shard.storage = Storage(hbm=0 if on_cpu else size, ddr=size if on_cpu else 0)


def _sharding_types(table: Table, topology: Topology) -> list[str]:
    """Return the types that FBGEMM can train: without whole tables where these are too wide."""
    if table.embedding_dim > topology.max_shard_columns:
        return SPLIT_COLUMN_TYPES
    return COLUMN_TYPES + ROW_TYPES if can_split_rows(table, topology) else COLUMN_TYPES


def _torchrec_topology(topology: Topology) -> TorchRecTopology:
    """Return TorchRec's topology with all known figures; its bandwidths are in bytes per ms."""
    known: dict[str, Any] = {}
    if topology.intra_host_bytes_per_s is not None:
        known["intra_host_bw"] = topology.intra_host_bytes_per_s / 1e3
    if topology.inter_host_bytes_per_s is not None:
        known["inter_host_bw"] = topology.inter_host_bytes_per_s / 1e3
    torchrec_topology = TorchRecTopology(
        world_size=topology.world_size,
        local_world_size=topology.ranks_per_host,
        compute_device=topology.compute_device,
        **known,
    )
    # Not as CustomTopologyData: TorchRec would cut rows into blocks in proportion to the memory,
    # which it does not train.
    memory = "ddr" if topology.compute_device == "cpu" else "hbm"
    devices = torchrec_topology.devices
    for device, memory_bytes in zip(devices, topology.rank_memory_bytes, strict=True):
        device.storage = dataclasses.replace(device.storage, **{memory: memory_bytes})
    return torchrec_topology


def _why_none(task: ShardingTask, error: PlannerError) -> str:
    topology = task.topology
    largest = max(task.tables, key=topology.table_bytes)
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
    return (
        f"TorchRec's planner found no plan ({reason}). Largest table: {largest.name!r} with "
        f"{topology.table_bytes(largest):,} B; all tables: {task.table_bytes / GIB:.2f} GiB on "
        f"{topology.world_size} ranks of {topology.rank_memory_text}, each all free; "
        f"add ranks or memory ({MEMORY_KEYS})"
    )
