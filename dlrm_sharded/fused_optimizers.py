"""Optimizers that FBGEMM runs inside the backward pass of the lookup."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_sharded.errors import ConfigError
from dlrm_sharded.task import CAN_REPLICATE

EMBEDDING_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
STATE_BYTES = {"sgd": (0, 0), "rowwise_adagrad": (0, 4), "adam": (8, 0)}
"""Optimizer state in bytes per weight and per row of a shard."""

FUSED_EPSILON = 1e-8
"""FBGEMM's default of what Adagrad and Adam add to their denominators."""


def fuse(optimizer: str, tables: Iterable[nn.Parameter], learning_rate: float) -> None:
    """Apply one of `EMBEDDING_OPTIMIZERS` to the tables' weights, before they are sharded."""
    apply_optimizer_in_backward(
        EMBEDDING_OPTIMIZERS[optimizer], list(tables), {"lr": learning_rate}
    )


def check_replicable(optimizer: str) -> None:
    """Raise ConfigError if no table can be replicated with one of `EMBEDDING_OPTIMIZERS`."""
    if optimizer not in CAN_REPLICATE:
        raise ConfigError(
            f"optimizer.embedding is {optimizer!r}, under which no table can be replicated: it "
            "would also change the rows of a replica that no sample looks up; use "
            f"{' or '.join(CAN_REPLICATE)}, or a plan without replicas"
        )
