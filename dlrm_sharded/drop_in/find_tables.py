"""Finds the tables of a TorchRec model, and what each of its modules can train."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_sharded.drop_in.module_tables import WHOLE_TYPES, ModuleTables, layouts_of_types
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

log = logging.getLogger(__name__)

FUSED_MODULES = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)
"""TorchRec's modules that have an optimizer of their own."""

PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16"}
"""Precisions of the weights of a module without configs of tables, by their type."""


def find_tables(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    topology: Topology,
) -> list[ModuleTables]:
    """Return the modules of a model that the sharders can shard, with their tables.

    Raises:
        ConfigError: there is no such module, it does not train, a table has a precision that cannot
            be planned, or is in two modules or twice in the model.
    """
    found: list[ModuleTables] = []
    seen: dict[int, tuple[torch.Tensor, str]] = {}
    for path, module, sharder in shardable(model, sharders):
        title = f"module {path!r} ({type(module).__name__})" if path else type(module).__name__
        is_pooled = not any(isinstance(m, EmbeddingCollectionInterface) for m in module.modules())
        types = _trained_types(sharder, topology.compute_device)
        _check_module(title, module, sharder, types, topology)
        layouts = _layouts(types, topology, is_pooled=is_pooled)
        if isinstance(module, nn.EmbeddingBag):  # TorchRec gives it one shard of columns only
            layouts -= {"columns"}
        tables = {}
        # TorchRec's unsharded modules hold in fp16 whatever is not in fp32, and FBGEMM does not.
        configured = {config.name: config.data_type.value.lower() for config in _configs(module)}
        features = {config.name: tuple(config.feature_names) for config in _configs(module)}
        means = _pooled_by(PoolingType.MEAN, module)
        averaged = frozenset(config.name for config in means)
        sums = _pooled_by(PoolingType.SUM, module)
        parameters = sharder.shardable_parameters(module)
        frozen = [name for name, weight in parameters.items() if not weight.requires_grad]
        if frozen and not isinstance(module, FUSED_MODULES):  # whose weights never have gradients
            log.warning(
                "%s has tables with requires_grad=False, which TorchRec's fused lookups train all "
                "the same: %s; a learning rate of 0 keeps their weights",
                title,
                ", ".join(frozen),
            )
        for name, weight in parameters.items():
            _, owner = seen.setdefault(id(weight), (weight, title))  # who is kept keeps its id
            if owner != title:
                raise ConfigError(
                    f"table {name!r} of {title} is also one of {owner}; TorchRec shards one of the "
                    "two or both, and then they train apart: register the module at one path of "
                    "the model, and call it from there in both places"
                )
            precision = configured.get(name, PRECISIONS.get(weight.dtype, str(weight.dtype)))
            if precision not in TABLE_BYTES:
                raise ConfigError(
                    f"table {name!r} of {title} has weights in {precision}; ShardedPlanner plans "
                    f"{' and '.join(TABLE_BYTES)}: change the data_type of its config"
                )
            own_layouts = layouts
            if precision != "fp32":  # TorchRec's dense lookup, which replicas need, has fp32 only
                own_layouts -= {"replicas"}
            if name in averaged and len(parameters) > 1 and not types.isdisjoint(WHOLE_TYPES):
                own_layouts -= {"rows", "host_rows"}  # see `ModuleTables`
            tables[name] = Table(
                name=name,
                num_embeddings=weight.shape[0],
                embedding_dim=weight.shape[1],
                pooling_factor=1.0,
                precision=precision,
                num_features=max(len(features.get(name, ())), 1),
                pooled=is_pooled,
                module=path,
                layouts=own_layouts,
            )
        found.append(
            ModuleTables(
                path=path,
                title=title,
                tables=tables,
                sharding_types=types,
                is_pooled=is_pooled,
                averaged=averaged,
                summed_and_averaged=_features(sums) & _features(means),
                features=features,
                is_weighted=_is_weighted(module),
                remaps_ids=isinstance(_collisions(module), ManagedCollisionCollection),
            )
        )
    if not found:
        raise ConfigError("the model has no embedding module that the given sharders can shard")
    return _with_unique_names(found)


def shardable(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """Yield each path of a module that can be sharded, the module and its sharder."""
    sharder_by_type = {sharder.module_type: sharder for sharder in sharders}
    paths: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        # outer modules come first, and their sharders also shard the modules inside
        is_inside = any(path.startswith(f"{outer}.") or not outer for outer in paths)
        if type(module) in sharder_by_type and not is_inside:
            paths.append(path)
            yield path, module, sharder_by_type[type(module)]


def _trained_types(sharder: ModuleSharder[Any], device: str) -> frozenset[str]:
    """Return the types that a module trains, replicas with the dense lookup, others fused.

    On CPUs, all types train that TorchRec offers on GPUs, though it does not offer all of them.
    """
    offered = {*sharder.sharding_types(device), *sharder.sharding_types("cuda")}
    return frozenset(
        name
        for name in offered
        if (
            EmbeddingComputeKernel.DENSE
            if name == ShardingType.DATA_PARALLEL.value
            else EmbeddingComputeKernel.FUSED
        ).value
        in sharder.compute_kernels(name, device)
    )


def _check_module(
    title: str,
    module: nn.Module,
    sharder: ModuleSharder[Any],
    types: frozenset[str],
    topology: Topology,
) -> None:
    """Raise ConfigError if TorchRec trains the module under no plan on these ranks."""
    names = [config.name for config in _configs(module)]
    title = f"table {names[0]!r} of {title}" if names else title
    if not types:
        raise ConfigError(
            f"{title} has no lookup that trains it under {type(sharder).__name__}; "
            "ShardedPlanner plans models that are trained"
        )
    if isinstance(module, EmbeddingTower | EmbeddingTowerCollection):
        raise ConfigError(
            f"{title} is in a tower, which ShardedPlanner does not plan; leave "
            f"{type(sharder).__name__} out of the sharders, and the tower's own collection is "
            "sharded"
        )
    collisions = _collisions(module)
    hashed = isinstance(collisions, ManagedCollisionCollection) and any(
        isinstance(inner, HashZchManagedCollisionModule) for inner in collisions.modules()
    )
    if hashed and topology.compute_device == "cpu":
        raise ConfigError(
            f"{title} has a HashZchManagedCollisionModule, whose ids FBGEMM remaps for training on "
            "CUDA only (RuntimeError: Expected readonly to be true); train on GPUs, or use an "
            "MCHManagedCollisionModule"
        )
    for name, buckets in collisions.table_to_number_buckets().items() if hashed else ():
        if buckets % topology.world_size:
            raise ConfigError(
                f"table {name!r} of {title.partition(' of ')[2]} has {buckets} buckets, which "
                f"{topology.world_size} ranks cannot share evenly, and TorchRec puts as many on "
                "each (ValueError: uneven buckets per rank); choose "
                f"total_num_buckets as a multiple of {topology.world_size}"
            )


def _collisions(module: nn.Module) -> Any:
    return getattr(module, "_managed_collision_collection", None)


def _layouts(types: frozenset[str], topology: Topology, *, is_pooled: bool) -> frozenset[str]:
    """Return the layouts that sharders may choose for the tables of a module.

    Sequences are not split by columns. They have no replicas, as FBGEMM's lookup of replicas pools
    on CPUs.
    """
    trained = layouts_of_types(types, topology)
    return trained if is_pooled else trained - {"columns", "replicas"}


def _pooled_by(kind: PoolingType, module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Return the configs of the tables that pool by the sum or by the mean."""
    return [config for config in _configs(module) if getattr(config, "pooling", None) is kind]


def _is_weighted(module: nn.Module) -> bool | None:
    says = (getattr(inner, "is_weighted", None) for inner in module.modules())
    return next((bool(of()) for of in says if callable(of)), None)


def _features(configs: Sequence[BaseEmbeddingConfig]) -> frozenset[str]:
    return frozenset(name for config in configs for name in config.feature_names)


def _configs(module: nn.Module) -> Iterator[BaseEmbeddingConfig]:
    """Yield the configs of the tables of a module and those inside."""
    for inner in module.modules():
        for configs in ("embedding_bag_configs", "embedding_configs"):
            if hasattr(inner, configs):
                yield from getattr(inner, configs)()


def _with_unique_names(found: Sequence[ModuleTables]) -> list[ModuleTables]:
    """Prefix names that several modules use with the path of the module."""
    names = [name for module in found for name in module.tables]

    def unique(module: ModuleTables, name: str) -> str:
        return f"{module.path}.{name}" if names.count(name) > 1 else name

    return [
        dataclasses.replace(
            module,
            tables={
                name: dataclasses.replace(table, name=unique(module, name))
                for name, table in module.tables.items()
            },
        )
        for module in found
    ]
