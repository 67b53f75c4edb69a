"""A planner for any TorchRec model that uses one of our sharders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.distributed.types import ShardingPlanner as TorchRecPlanner

from dlrm_sharded.distributed import (
    all_or_none,
    detect_topology,
    on_rank_zero,
    with_memory_of_all_ranks,
)
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.layouts import layout_of
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology
from dlrm_sharded.torchrec_adapter import parameter_sharding
from dlrm_sharded.validation import validate

DEFAULT_LOCAL_BATCH_SIZE = 512
"""Samples per rank that TorchRec's planner assumes by default."""


class ShardedPlanner(TorchRecPlanner):
    """Drop-in for TorchRec's `EmbeddingShardingPlanner` that plans with any of our sharders.

    It plans all tables of the model together, in whatever modules they are.

    Args:
        topology: where the model runs; this job's ranks and memory where it is not given.
        batch_size: global; 512 samples a rank where it is not given.
        pooling_factors: mean ids per sample of each table, by its name; 1 for tables not in it.
    """

    def __init__(
        self,
        sharder: Sharder,
        *,
        topology: Topology | None = None,
        batch_size: int | None = None,
        pooling_factors: Mapping[str, float] | None = None,
    ) -> None:
        self._sharder = sharder
        self._topology = topology
        self._batch_size = batch_size
        self._pooling_factors = pooling_factors or {}

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> TorchRecPlan:
        """Plan the modules that `sharders` can shard.

        Raises:
            ConfigError: there is no such module.
            ShardingError: there is no plan.
        """
        return self._plan(module, sharders, self._topology or detect_topology())

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> TorchRecPlan:
        """Plan on the group's rank 0; every rank gets the plan, or the exception."""
        chosen = get_default_sharders() if sharders is None else sharders
        topology = self._topology or _topology_of_all_ranks(pg)
        return on_rank_zero(lambda: self._plan(module, chosen, topology), group=pg)

    def _plan(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]], topology: Topology
    ) -> TorchRecPlan:
        tables_of_module = self._find_tables(module, sharders)
        task = ShardingTask(
            tables=tuple(t for tables in tables_of_module.values() for t in tables.values()),
            topology=topology,
            batch_size=self._batch_size or DEFAULT_LOCAL_BATCH_SIZE * topology.world_size,
        )
        plan = self._sharder.shard(task)
        validate(plan, task)
        shards = plan.shards_by_table()
        return TorchRecPlan(
            {
                path: EmbeddingModuleShardingPlan(
                    {
                        parameter: parameter_sharding(
                            shards[table.name],
                            layout_of(shards[table.name], table, topology),
                            topology,
                        )
                        for parameter, table in tables.items()
                    }
                )
                for path, tables in tables_of_module.items()
            }
        )

    def _find_tables(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> dict[str, dict[str, Table]]:
        """Return tables by path of their module and parameter name; outer modules come first."""
        sharder_of_type = {sharder.module_type: sharder for sharder in sharders}
        tables_by_module: dict[str, dict[str, Table]] = {}
        for path, child in module.named_modules():
            inside_another = any(
                path.startswith(f"{outer}.") or not outer for outer in tables_by_module
            )
            if type(child) not in sharder_of_type or inside_another:
                continue
            parameters = sharder_of_type[type(child)].shardable_parameters(child)
            tables_by_module[path] = {
                name: Table(
                    name=name,
                    num_embeddings=weight.shape[0],
                    embedding_dim=weight.shape[1],
                    pooling_factor=self._pooling_factors.get(name, 1.0),
                )
                for name, weight in parameters.items()
            }
        if not tables_by_module:
            raise ConfigError("the model has no embedding module that the given sharders can shard")
        unknown = set(self._pooling_factors) - {
            name for tables in tables_by_module.values() for name in tables
        }
        if unknown:
            raise ConfigError(f"pooling_factors names {sorted(unknown)}, which the model lacks")
        return _with_unique_names(tables_by_module)


def _topology_of_all_ranks(group: dist.ProcessGroup | None) -> Topology:
    with all_or_none(group=group):
        topology = detect_topology(group=group)
    return with_memory_of_all_ranks(topology, group=group)


def _with_unique_names(
    tables_by_module: dict[str, dict[str, Table]],
) -> dict[str, dict[str, Table]]:
    """Return the tables with the module's path before names that several modules use."""
    names = [name for tables in tables_by_module.values() for name in tables]
    return {
        path: {
            name: dataclasses.replace(table, name=f"{path}.{name}")
            if names.count(name) > 1
            else table
            for name, table in tables.items()
        }
        for path, tables in tables_by_module.items()
    }
