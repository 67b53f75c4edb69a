"""Small TorchRec models, layouts of their tables, sharders, and plans of these."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.search import SearchSharder
from dlrm_sharded.sharders.torchrec import TorchRecSharder
from tests.distributed.torchrec_modules import managed_collisions, table_configs
from tests.unit.synthetic import column_shards

META = torch.device("meta")
ROWS = (60_000, 40, 30_000, 24, 20_000, 50)
TOPOLOGY = Topology(4, 10**9, local_world_size=2, compute_device="cpu")
MODEL = learned_cost_model(RunContext())
Plan = Mapping[str, ParameterSharding]
SHARDERS: dict[str, Callable[[], Sharder]] = {
    "dim": lambda: GreedySharder("dim"),
    "search": lambda: SearchSharder(SharderContext(cost_model=MODEL), patience=1),
    "torchrec_full": lambda: TorchRecSharder(full=True, min_partition=4),
}


def replicas(table: Table, i: int, world_size: int) -> list[Shard]:
    return Replicas(world_size).shards(table)


def columns(*widths: int) -> Callable[[Table, int, int], list[Shard]]:
    """Column shards of these widths, which the tables with even numbers have."""

    def shards(table: Table, i: int, world_size: int) -> list[Shard]:
        return [Shard.whole(table, 0)] if i % 2 else column_shards(table, *enumerate(widths))

    return shards


def host_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return RowBlocks(range(2)).shards(table)


def all_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return RowBlocks(range(world_size)).shards(table)


def some_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return [Shard.whole(table, 0)] if i == 1 else all_rows(table, i, world_size)


def bags(
    data_type: DataType = DataType.FP32, *, means: Sequence[int] = (), feature: str = "f{}"
) -> EmbeddingBagCollection:
    configs = table_configs(ROWS, [64], means=means, feature=feature, data_type=data_type)
    return EmbeddingBagCollection(tables=configs, device=META)


def sequences() -> EmbeddingCollection:
    configs = table_configs(ROWS, [64], kind=EmbeddingConfig, name="s", feature="g{}")
    return EmbeddingCollection(tables=configs, device=META)


def managed_bags(rows: int = 1000) -> ManagedCollisionEmbeddingBagCollection:
    configs = table_configs([rows], [64], name="managed")
    bags = EmbeddingBagCollection(tables=configs, device=META)
    return ManagedCollisionEmbeddingBagCollection(bags, managed_collisions(configs, interval=1))


def managed_sequences() -> ManagedCollisionEmbeddingCollection:
    configs = table_configs([1000], [64], kind=EmbeddingConfig, name="managed")
    sequences = EmbeddingCollection(tables=configs, device=META)
    return ManagedCollisionEmbeddingCollection(sequences, managed_collisions(configs, interval=1))


def plan(
    model: nn.Module, sharder: Sharder, topology: Topology = TOPOLOGY, **options: Any
) -> dict[str, Plan]:
    options = {"cost_model": None, "global_batch_size": 65_536} | options
    planner = ShardedPlanner(sharder, topology=topology, **options)
    return dict(planner.plan(model, get_default_sharders()).plan)


def types(module_plan: Plan) -> set[str]:
    return {parameter.sharding_type for parameter in module_plan.values()}
