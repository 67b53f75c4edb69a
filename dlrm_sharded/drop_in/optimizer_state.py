"""The memory of optimizers that are fused into the tables of a TorchRec model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from dlrm_sharded.drop_in.find_tables import FUSED_MODULES, shardable
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.task import Topology

OPTIMIZER_BYTES = {
    "none": (0, 0),
    "sgd": (0, 0),
    "exact_sgd": (0, 0),
    "exact_adagrad": (4, 0),
    "lars_sgd": (4, 0),
    "row_wise_adagrad": (0, 4),
    "exact_row_wise_adagrad": (0, 4),
    "partial_row_wise_adam": (4, 4),
    "partial_row_wise_lamb": (4, 4),
    "adam": (8, 0),
    "lamb": (8, 0),
}
"""State of FBGEMM's optimizers in bytes per weight and per row of a shard, by `EmbOptimType`."""

LARGEST_STATE = (8, 8)
"""The same for optimizers that are not listed."""

PRICED_AS = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "row_wise_adagrad": "rowwise_adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "adam": "adam",
}
"""Names of `EMBEDDING_OPTIMIZERS` by `EmbOptimType`."""


def with_optimizer_state(
    topology: Topology, model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Topology:
    """Return the topology with memory for the state of the tables' fused optimizers.

    All tables count the largest state of any, and never less than the topology says.

    Raises:
        ConfigError: a table has an optimizer that TorchRec does not fuse.
    """
    per_weight, per_row = 0, 0
    for optimizer in _fused_types(model, sharders):
        if optimizer is not None:
            state = OPTIMIZER_BYTES.get(optimizer.value, LARGEST_STATE)
            per_weight, per_row = max(per_weight, state[0]), max(per_row, state[1])
    fp32 = torch.float32.itemsize
    return dataclasses.replace(
        topology,
        bytes_per_element=max(topology.bytes_per_element, fp32 + per_weight),
        optimizer_bytes_per_row=max(topology.optimizer_bytes_per_row, per_row),
    )


def optimizer_of_tables(model: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> str | None:
    """Return the name of the fused optimizer that all tables have; None if there is none.

    It is one of `EMBEDDING_OPTIMIZERS`, of which prices and the journal of runs know.
    """
    found = {optimizer and optimizer.value for optimizer in _fused_types(model, sharders)}
    return PRICED_AS.get(found.pop()) if len(found) == 1 else None


def _fused_types(model: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> Iterator[Any]:
    """Yield the fused optimizer of each table, a member of `EmbOptimType`; None if it has none."""
    for path, module, sharder in shardable(model, sharders):
        stated = _stated(sharder)
        if isinstance(module, FUSED_MODULES):
            stated = fused_type(module.optimizer_type(), path or type(module).__name__)
        for name, weight in sharder.shardable_parameters(module).items():
            optimizer = stated
            for fused in getattr(weight, "_optimizer_classes", ()):
                optimizer = fused_type(fused, f"{path}.{name}" if path else name)
            yield optimizer


def _stated(sharder: ModuleSharder[Any]) -> Any:
    """Return the optimizer in a sharder's `fused_params`; None if it states none.

    Raises:
        ConfigError: it is no member of FBGEMM's `EmbOptimType`, as TorchRec requires.
    """
    stated = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
    if stated is not None and not isinstance(stated, Enum):
        raise ConfigError(
            f"fused_params of {type(sharder).__name__} names the optimizer {stated!r}; TorchRec "
            "takes a member of fbgemm_gpu's EmbOptimType, such as EmbOptimType.ADAM"
        )
    return stated


def fused_type(optimizer: type[Optimizer], path: str) -> Any:
    """Return the member of FBGEMM's `EmbOptimType` for an optimizer.

    Raises:
        ConfigError: there is none; the message names the path of the module or table.
    """
    try:
        return optimizer_type_to_emb_opt_type(optimizer)
    except ValueError as error:
        raise ConfigError(
            f"{path!r} has the fused optimizer {optimizer.__name__}, which TorchRec cannot fuse; "
            "use one that it can, such as torch.optim.Adam or torchrec.optim.RowWiseAdagrad"
        ) from error
