"""Optimizers that FBGEMM runs inside the backward pass of the lookup."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

EMBEDDING_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
STATE_BYTES = {"sgd": (0, 0), "rowwise_adagrad": (0, 4), "adam": (8, 0)}
"""Optimizer state in bytes per weight and per row of a shard."""


def fuse(optimizer: str, tables: Iterable[nn.Parameter], learning_rate: float) -> None:
    """Apply one of `EMBEDDING_OPTIMIZERS` to the tables' weights, before they are sharded."""
    apply_optimizer_in_backward(
        EMBEDDING_OPTIMIZERS[optimizer], list(tables), {"lr": learning_rate}
    )
