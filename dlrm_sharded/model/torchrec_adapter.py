"""Converts a plan to TorchRec's types, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig

from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.plans.layouts import Layout, Replicas, layout_of
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}
"""TorchRec's types of weights, by precision."""

CACHE_LINE_BYTES = 128
"""Bytes that a GPU reads at a time. Cache lines of CPUs are as long or half as long."""

TAKEN_NAMES = frozenset(dir(nn.ModuleDict()))
"""Names that `ModuleDict` refuses for modules, because they are names of its attributes."""


def module_name(table: str) -> str:
    """Return the name of a table in TorchRec's modules, which must not have dots.

    Most tables keep their name. In the others, some characters are percent-encoded.
    """
    name = table.replace("%", "%25").replace(".", "%2E")
    return f"%{ord(name[0]):X}{name[1:]}" if name in TAKEN_NAMES else name


def table_name(module: str) -> str:
    """Return the table's name, given its name in TorchRec's modules."""
    return unquote(module)


def sharding_env(group: dist.ProcessGroup | None = None) -> ShardingEnv:
    """Return TorchRec's environment of a group (None for all ranks), without a device mesh.

    TorchRec's own constructor makes a mesh, which plans without DTensors never use. On NCCL that is
    a collective of all ranks of the job, so the ranks of a smaller group would wait forever.
    """
    env = ShardingEnv(dist.get_world_size(group), dist.get_rank(group))
    env.process_group = group or dist.group.WORLD
    return env


def in_aligned_order(tables: Sequence[Table]) -> list[Table]:
    """Return the tables in the order in which the fewest rows straddle cache lines.

    FBGEMM concatenates the weights of a rank's tables in the order of the collection, and their
    pooled vectors too. Rows of 64 columns that come after a table of 4 columns and an odd number of
    rows each touch one more line. So tables are sorted by the largest power of two that divides
    their rows' bytes, up to a line of a GPU; tables that are equal in this keep their order.
    """
    return sorted(tables, key=lambda table: -math.gcd(_row_bytes(table), CACHE_LINE_BYTES))


def _row_bytes(table: Table) -> int:
    return table.embedding_dim * TABLE_BYTES[table.precision]


def bag_configs(tables: Sequence[Table]) -> list[EmbeddingBagConfig]:
    """Return TorchRec's configs of the tables.

    The configs have names from `module_name`, and the features of the tables.
    """
    return [EmbeddingBagConfig(**_config(table)) for table in tables]


def sequence_configs(tables: Sequence[Table]) -> list[EmbeddingConfig]:
    """Return TorchRec's configs, as `bag_configs` does, for tables whose vectors are not pooled."""
    return [EmbeddingConfig(**_config(table)) for table in tables]


def _config(table: Table) -> dict[str, Any]:
    return {
        "name": module_name(table.name),
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "feature_names": list(table.feature_names),
        "data_type": DATA_TYPES[table.precision],
    }


def to_torchrec(
    plan: ShardingPlan, tables: Sequence[Table], topology: Topology
) -> EmbeddingModuleShardingPlan:
    """Return TorchRec's plan of one embedding module; the plan must be valid for the tables."""
    shards = plan.shards_by_table()
    return EmbeddingModuleShardingPlan(
        {
            module_name(table.name): parameter_sharding(
                shards[table.name], layout_of(shards[table.name], table, topology), topology
            )
            for table in tables
        }
    )


def from_torchrec(
    module_plan: Mapping[str, ParameterSharding], tables: Sequence[Table], world_size: int
) -> tuple[Shard, ...]:
    """Return the shards in TorchRec's plan of one embedding module.

    Raises:
        InvalidPlanError: a table has no shards and is not data-parallel.
    """
    table_by_name = {table.name: table for table in tables}
    shards: list[Shard] = []
    for module, parameter in module_plan.items():
        name = table_name(module)
        if parameter.sharding_type == ShardingType.DATA_PARALLEL.value:
            shards += Replicas(world_size).shards(table_by_name[name])
            continue
        if parameter.sharding_spec is None:
            raise InvalidPlanError(
                f"table {name!r} is {parameter.sharding_type} without shards; a plan can say "
                "table-, column-, row-wise and data-parallel only"
            )
        for metadata in parameter.sharding_spec.shards:
            (row, col), (num_rows, num_cols) = metadata.shard_offsets, metadata.shard_sizes
            if num_rows and num_cols:
                rank = metadata.placement.rank()
                rows, cols = (row, row + num_rows), (col, col + num_cols)
                precision = table_by_name[name].precision
                shards.append(Shard(name, rank, rows, cols, False, precision))
    return tuple(shards)


def parameter_sharding(
    shards: Sequence[Shard], layout: Layout, topology: Topology
) -> ParameterSharding:
    """Return the shards of one table in TorchRec's form."""
    if isinstance(layout, Replicas):  # a separate optimizer gets their mean gradients
        return ParameterSharding(
            sharding_type=layout.torchrec_type(topology),
            compute_kernel=EmbeddingComputeKernel.DENSE.value,
            ranks=list(range(topology.world_size)),
        )
    return ParameterSharding(
        sharding_type=layout.torchrec_type(topology),
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=[shard.rank for shard in shards],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.rows[0], shard.cols[0]],
                    shard_sizes=[shard.num_rows, shard.num_cols],
                    placement=placement(
                        topology.compute_device, shard.rank, topology.ranks_per_host
                    ),
                )
                for shard in shards
            ]
        ),
    )
