"""The fused optimizers of a TorchRec model's tables, and the memory of their state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)

from dlrm_sharded.drop_in.module_tables import ModuleTables
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.table_optimizers import STATE_BYTES
from dlrm_sharded.plans.task import Topology

FUSED_MODULES = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)
"""TorchRec's modules that have their own optimizer."""

KNOWN_OPTIMIZERS = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "row_wise_adagrad": "rowwise_adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "exact_adagrad": "elementwise_adagrad",
    "adam": "adam",
}
"""Names of `STATE_BYTES` by the value of FBGEMM's `EmbOptimType`."""

OTHER_STATES = {
    "none": (0, 0),
    "lars_sgd": (4, 0),
    "partial_row_wise_adam": (4, 4),
    "partial_row_wise_lamb": (4, 4),
    "lamb": (8, 0),
}
"""State of FBGEMM's other optimizers in bytes per weight and per row of a shard."""

LARGEST_STATE = (8, 8)
"""State of optimizers that are in neither table."""


def with_optimizer_state(topology: Topology, modules: Sequence[ModuleTables]) -> Topology:
    """Return the topology with memory for the state of the tables' fused optimizers.

    Each table counts its own optimizer's state, and never less than the topology states.
    """
    stated = topology.bytes_per_element - torch.float32.itemsize, topology.optimizer_bytes_per_row
    states = {
        table.name: _larger(stated, _state_of(module.optimizers[name]))
        for module in modules
        for name, table in module.tables.items()
    }
    per_weight, per_row = map(max, zip(*states.values(), strict=True))
    return dataclasses.replace(
        topology,
        bytes_per_element=torch.float32.itemsize + per_weight,
        optimizer_bytes_per_row=per_row,
        optimizer_bytes_by_table=states if len({*states.values()}) > 1 else {},
    )


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])


def _state_of(optimizer: str | None) -> tuple[int, int]:
    if optimizer in KNOWN_OPTIMIZERS:
        return STATE_BYTES[KNOWN_OPTIMIZERS[optimizer]]
    return OTHER_STATES.get(optimizer or "none", LARGEST_STATE)


def optimizer_of_tables(modules: Sequence[ModuleTables]) -> str | None:
    """Return the name of the fused optimizer that all tables have, as costs know it; else None."""
    found = {optimizer for module in modules for optimizer in module.optimizers.values()}
    return KNOWN_OPTIMIZERS.get(found.pop() or "") if len(found) == 1 else None


def fused_optimizers(
    path: str, module: nn.Module, sharder: ModuleSharder[Any]
) -> dict[str, str | None]:
    """Return the fused optimizer of each parameter of a module, a value of `EmbOptimType`.

    Raises:
        ConfigError: TorchRec does not fuse an optimizer.
    """
    stated = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
    if stated is not None and not isinstance(stated, Enum):
        raise ConfigError(
            f"fused_params of {type(sharder).__name__} names the optimizer {stated!r}; TorchRec "
            "takes a member of fbgemm_gpu's EmbOptimType, such as EmbOptimType.ADAM"
        )
    of_module = None if stated is None else str(stated.value)
    if isinstance(module, FUSED_MODULES):
        of_module = _fused(module.optimizer_type(), path or type(module).__name__)
    optimizers = {}
    for name, weight in sharder.shardable_parameters(module).items():
        optimizers[name] = of_module
        for optimizer in getattr(weight, "_optimizer_classes", ()):
            optimizers[name] = _fused(optimizer, f"{path}.{name}" if path else name)
    return optimizers


def _fused(optimizer: type[Optimizer], path: str) -> str:
    """Return the value of FBGEMM's `EmbOptimType` for an optimizer.

    Raises:
        ConfigError: there is none; the message names the path of the module or table.
    """
    try:
        return str(optimizer_type_to_emb_opt_type(optimizer).value)
    except ValueError as error:
        raise ConfigError(
            f"{path!r} has the fused optimizer {optimizer.__name__}, which TorchRec cannot fuse; "
            "use one that it can, such as torch.optim.Adam or torchrec.optim.RowWiseAdagrad"
        ) from error
