"""Embedding modules of TorchRec, and a sharder that lays their tables out as a test says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from dlrm_sharded import ShardingPlan
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask


class LaidOut:
    """Lays every table out as a function of it, its number and the number of ranks says."""

    def __init__(self, shards: Callable[[Table, int, int], list[Shard]]) -> None:
        self._shards = shards

    def shard(self, task: ShardingTask) -> ShardingPlan:
        world_size = task.topology.world_size
        by_table = [self._shards(table, i, world_size) for i, table in enumerate(task.tables)]
        return ShardingPlan(world_size, tuple(shard for shards in by_table for shard in shards))


class OnlyReplicas(EmbeddingBagCollectionSharder):
    """Offers one type and its kernel, as sharders in TorchRec's own tests do."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["data_parallel"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense"]


class OnlyReplicasOfSequences(EmbeddingCollectionSharder):
    sharding_types = OnlyReplicas.sharding_types
    compute_kernels = OnlyReplicas.compute_kernels


def local_weights(weights: Mapping[str, Tensor]) -> list[tuple[str, tuple[slice, slice], Tensor]]:
    """Return name, place in its table and weights of each shard and replica of this rank."""
    found = []
    for name, weight in weights.items():
        pieces = [([0, 0], weight)]  # of a replica
        if isinstance(weight, ShardedTensor):
            pieces = [(s.metadata.shard_offsets, s.tensor) for s in weight.local_shards()]
        for offsets, tensor in pieces:
            rows, columns = map(slice, offsets, map(sum, zip(offsets, tensor.shape, strict=True)))
            found.append((name, (rows, columns), tensor))
    return found


def table_configs(
    rows: Sequence[int],
    dims: Sequence[int],
    *,
    kind: Callable[..., Any] = EmbeddingBagConfig,
    name: str = "t",
    feature: str = "f{}",
    means: Sequence[int] = (),
    **options: Any,
) -> list[Any]:
    """Tables of which some pool by the mean.

    Args:
        dims: taken in turn.
        feature: with a place for the number of the table, or one that all of them look up.
    """
    configs = [
        kind(
            name=f"{name}{i}",
            num_embeddings=num_rows,
            embedding_dim=dims[i % len(dims)],
            feature_names=[feature.format(i)],
            **options,
        )
        for i, num_rows in enumerate(rows)
    ]
    for i in means:
        configs[i].pooling = PoolingType.MEAN
    return configs


def managed_collisions(configs: Sequence[Any], *, interval: int) -> ManagedCollisionCollection:
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=interval,
            input_hash_size=4000,
        )
        for config in configs
    }
    return ManagedCollisionCollection(modules, [*configs])
