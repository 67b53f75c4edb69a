"""Finds the tables of a TorchRec model, and what each of its modules can train."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_sharded.drop_in.module_tables import (
    PLANNED_TYPES,
    ModuleTables,
    kernel_of,
    layouts_of_types,
)
from dlrm_sharded.drop_in.optimizer_state import FUSED_MODULES, fused_optimizers
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.precision import TABLE_BYTES
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

log = logging.getLogger(__name__)

PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16"}
"""Precisions of weights by their dtype, for modules without configs of tables."""


def find_tables(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]], topology: Topology
) -> list[ModuleTables]:
    """Return the modules of a model that the sharders can shard, with their tables.

    Raises:
        ConfigError: there is no such module, it does not train, a table has a precision or an
            optimizer that cannot be planned, or is in two modules or twice in the model.
    """
    found: list[ModuleTables] = []
    owners: dict[int, tuple[torch.Tensor, str]] = {}  # a tensor that is kept keeps its id
    for path, module, sharder in _shardable(model, sharders):
        one = _module_tables(path, module, sharder, topology)
        for name, weight in sharder.shardable_parameters(module).items():
            _, owner = owners.setdefault(id(weight), (weight, one.title))
            if owner != one.title:
                raise ConfigError(
                    f"table {name!r} of {one.title} is also one of {owner}; TorchRec shards one of "
                    "the two or both, and then they train apart: register the module at one path "
                    "of the model, and call it from there in both places"
                )
        found.append(one)
    if not found:
        raise ConfigError("the model has no embedding module that the given sharders can shard")
    return _with_unique_names(found)


def _shardable(
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


def _module_tables(
    path: str, module: nn.Module, sharder: ModuleSharder[Any], topology: Topology
) -> ModuleTables:
    title = f"module {path!r} ({type(module).__name__})" if path else type(module).__name__
    types = _trained_types(sharder, topology.compute_device)
    if not types or isinstance(module, EmbeddingTower | EmbeddingTowerCollection):
        why = "is a tower" if types else "has no lookup that trains"
        raise ConfigError(
            f"{title} {why} under {type(sharder).__name__}, and is not planned; leave that sharder "
            "out, and the collections inside the module are planned"
        )
    parameters = sharder.shardable_parameters(module)
    frozen = [name for name, weight in parameters.items() if not weight.requires_grad]
    if frozen and not isinstance(module, FUSED_MODULES):  # whose weights never have gradients
        log.warning(
            "%s has tables with requires_grad=False, which TorchRec's fused lookups train all the "
            "same: %s; a learning rate of 0 keeps their weights",
            title,
            ", ".join(frozen),
        )
    configs = {config.name: config for config in _configs(module)}
    is_weighted = (getattr(inner, "is_weighted", None) for inner in module.modules())
    collisions = getattr(module, "_managed_collision_collection", None)
    return ModuleTables(
        path=path,
        title=title,
        tables=_tables(path, title, module, parameters, configs, layouts_of_types(types, topology)),
        types=dict.fromkeys(parameters, types),
        averaged=frozenset(
            name
            for name, config in configs.items()
            if getattr(config, "pooling", None) is PoolingType.MEAN
        ),
        features={name: tuple(config.feature_names) for name, config in configs.items()},
        optimizers=fused_optimizers(path, module, sharder),
        is_weighted=next((bool(of()) for of in is_weighted if callable(of)), None),
        remaps_ids=isinstance(collisions, ManagedCollisionCollection),
    )


def _tables(
    path: str,
    title: str,
    module: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    configs: Mapping[str, BaseEmbeddingConfig],
    layouts: frozenset[str],
) -> dict[str, Table]:
    """Return the tables of a module, by the name of their parameter.

    Args:
        layouts: layouts of the module's sharding types.
    """
    is_pooled = not any(isinstance(m, EmbeddingCollectionInterface) for m in module.modules())
    if not is_pooled:  # not split by columns; FBGEMM's lookup of replicas pools on CPUs
        layouts -= {"columns", "replicas"}
    if isinstance(module, nn.EmbeddingBag):  # TorchRec gives it one shard of columns only
        layouts -= {"columns"}
    tables = {}
    for name, weight in parameters.items():
        precision, num_features = PRECISIONS.get(weight.dtype, str(weight.dtype)), 1
        if config := configs.get(name):
            # TorchRec's unsharded modules hold in fp16 whatever is not in fp32, FBGEMM does not.
            precision = config.data_type.value.lower()
            num_features = max(len(config.feature_names), 1)
        if precision not in TABLE_BYTES:
            raise ConfigError(
                f"table {name!r} of {title} has weights in {precision}; ShardedPlanner plans "
                f"{' and '.join(TABLE_BYTES)}: change the data_type of its config"
            )
        tables[name] = Table(
            name=name,
            num_embeddings=weight.shape[0],
            embedding_dim=weight.shape[1],
            pooling_factor=1.0,
            precision=precision,
            num_features=num_features,
            pooled=is_pooled,
            module=path,
            # TorchRec's dense lookup, which replicas need, has fp32 only.
            layouts=layouts if precision == "fp32" else layouts - {"replicas"},
        )
    return tables


def _trained_types(sharder: ModuleSharder[Any], device: str) -> frozenset[str]:
    """Return the types that a module trains, replicas with the dense lookup, others fused.

    All types that TorchRec offers on GPUs also train on CPUs, where it does not offer all of them.
    """
    offered = {*sharder.sharding_types(device), *sharder.sharding_types("cuda")}
    return frozenset(
        name
        for name in PLANNED_TYPES & offered
        if kernel_of(name) in sharder.compute_kernels(name, device)
    )


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
