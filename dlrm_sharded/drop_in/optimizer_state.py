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
from dlrm_sharded.drop_in.module_tables import ModuleTables
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
    "exact_adagrad": "elementwise_adagrad",
    "adam": "adam",
}
"""Names of `EMBEDDING_OPTIMIZERS` by `EmbOptimType`."""


def with_optimizer_state(
    topology: Topology,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    modules: Sequence[ModuleTables],
) -> Topology:
    """Return the topology with memory for the state of the tables' fused optimizers.

    Each table counts that of its own, and never less than the topology says.

    Args:
        modules: those of `find_tables`.

    Raises:
        ConfigError: a table has an optimizer that TorchRec does not fuse.
    """
    by_path = {found.path: found.tables for found in modules}
    stated = topology.bytes_per_element - torch.float32.itemsize, topology.optimizer_bytes_per_row
    states: dict[str, tuple[int, int]] = {}
    for path, name, optimizer in _fused_types(model, sharders):
        state = stated
        if optimizer is not None:
            needed = OPTIMIZER_BYTES.get(optimizer.value, LARGEST_STATE)
            state = max(stated[0], needed[0]), max(stated[1], needed[1])
        states[by_path[path][name].name] = state
    per_weight, per_row = (max(state[i] for state in states.values()) for i in range(2))
    return dataclasses.replace(
        topology,
        bytes_per_element=torch.float32.itemsize + per_weight,
        optimizer_bytes_per_row=per_row,
        optimizer_bytes_by_table=states if len({*states.values()}) > 1 else {},
    )


def optimizer_of_tables(model: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> str | None:
    """Return the name of the fused optimizer that all tables have; None if there is none.

    It is one of `EMBEDDING_OPTIMIZERS`, of which prices and the journal of runs know.
    """
    found = {optimizer and optimizer.value for _, _, optimizer in _fused_types(model, sharders)}
    return PRICED_AS.get(found.pop()) if len(found) == 1 else None


def _fused_types(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, str, Any]]:
    """Yield module, parameter and fused optimizer of each table.

    The optimizer is a member of `EmbOptimType`; None if the table has none.
    """
    for path, module, sharder in shardable(model, sharders):
        stated = _stated(sharder)
        if isinstance(module, FUSED_MODULES):
            stated = _fused_type(module.optimizer_type(), path or type(module).__name__)
        for name, weight in sharder.shardable_parameters(module).items():
            optimizer = stated
            for fused in getattr(weight, "_optimizer_classes", ()):
                optimizer = _fused_type(fused, f"{path}.{name}" if path else name)
            yield path, name, optimizer


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


def _fused_type(optimizer: type[Optimizer], path: str) -> Any:
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
