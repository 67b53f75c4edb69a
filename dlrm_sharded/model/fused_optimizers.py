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
    "elementwise_adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
"""Fused optimizers by name.


A new one also needs its memory in `plans/table_optimizers.py` (`STATE_BYTES` and the two sets
there), a cost in `cost/gpu_lookups.py` (`UPDATE_LINES`), a yaml in `conf/optimizer`, its name in
`drop_in/optimizer_state.py` (`KNOWN_OPTIMIZERS`) and, if it trains replicas, a branch in
`replicas.py`.
"""
FUSED_EPSILON = 1e-8
"""FBGEMM's default of what Adagrad and Adam add to their denominators."""


def fuse(optimizer: str, tables: Iterable[nn.Parameter], learning_rate: float) -> None:
    """Apply one of `EMBEDDING_OPTIMIZERS` to the tables' weights, before they are sharded."""
    apply_optimizer_in_backward(
        EMBEDDING_OPTIMIZERS[optimizer], list(tables), {"lr": learning_rate}
    )
