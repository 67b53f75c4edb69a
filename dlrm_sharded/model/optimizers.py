"""Optimizers: those of the tables are fused into the backward pass, the dense part's are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_sharded.files.errors import ConfigError, check_choice, check_count, check_number
from dlrm_sharded.model.dense_adagrad import DenseAdagrad, has_fused_kernel
from dlrm_sharded.model.dlrm import Dlrm, embedding_parameters
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS, fuse
from dlrm_sharded.model.replicas import REPLICAS, replica_optimizer
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.table_optimizers import why_not_fused

DENSE_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": DenseAdagrad,
    "adam": torch.optim.Adam,
}
DENSE_STATE_TENSORS = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Number of state tensors, each as large as the weight, that a dense optimizer keeps."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate over steps, as in the DLRM reference: warm-up, constant, decay.

    The warm-up is linear and the decay is quadratic, down to zero; without `decay_steps` the rate
    stays constant.
    """

    warmup_steps: int = 0
    decay_start_step: int = 0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for key in ("warmup_steps", "decay_start_step", "decay_steps"):
            check_count(f"optimizer.schedule.{key}", getattr(self, key), least=0)
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            raise ConfigError(
                f"optimizer.schedule.decay_start_step is {self.decay_start_step}, before the "
                f"{self.warmup_steps} warm-up steps end"
            )

    def factor(self, step: int) -> float:
        """Return the multiplier of the learning rate at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decay_steps or step < self.decay_start_step:
            return 1.0
        left = 1 - (step - self.decay_start_step) / self.decay_steps
        return max(left, 0.0) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizers of the tables and of the dense part of the model.

    Args:
        embedding: one of `EMBEDDING_OPTIMIZERS`, fused into the lookup's backward pass.
        dense: one of `DENSE_OPTIMIZERS`.
        clip_norm: norm to which larger gradients of the dense part are scaled down; None for no
            clipping. Fused optimizers never hold a table's gradient, so tables are not clipped.
    """

    embedding: str
    embedding_learning_rate: float
    dense: str
    dense_learning_rate: float
    clip_norm: float | None = None
    schedule: Schedule = Schedule()

    def __post_init__(self) -> None:
        for key, known in (("embedding", EMBEDDING_OPTIMIZERS), ("dense", DENSE_OPTIMIZERS)):
            check_choice(f"optimizer.{key}", getattr(self, key), known)
            rate_key = f"{key}_learning_rate"
            check_number(f"optimizer.{rate_key}", getattr(self, rate_key))
        if self.clip_norm is not None:
            check_number("optimizer.clip_norm", self.clip_norm, above=True)

    def check_device(self, device: torch.device) -> None:
        """Raise ConfigError if FBGEMM cannot fuse the optimizer on the device: Adam on a CPU."""
        if reason := why_not_fused(self.embedding, device.type):
            raise ConfigError(f"optimizer.embedding is {reason}")

    def fuse_into(self, model: Dlrm) -> None:
        """Register the embedding optimizer; this must happen before the model is sharded."""
        fuse(self.embedding, embedding_parameters(model), self.embedding_learning_rate)

    def build(self, model: DistributedModelParallel) -> CombinedOptimizer:
        """Build the optimizers of the tables, replicas and dense part, combined in one."""
        embeddings = sharded_embeddings(model)
        in_tables = {id(parameter) for parameter in embeddings.parameters()}
        dense = self.build_dense(
            {
                name: parameter
                for name, parameter in in_backward_optimizer_filter(model.named_parameters())
                if id(parameter) not in in_tables
            }
        )
        replicas = replica_optimizer(embeddings, self.embedding, self.embedding_learning_rate)
        parts = [("embedding", model.fused_optimizer), ("dense", dense)]
        return CombinedOptimizer(parts + ([(REPLICAS, replicas)] if replicas else []))

    def build_dense(self, parameters: Mapping[str, nn.Parameter]) -> KeyedOptimizer:
        """Build the optimizer of the dense part from its parameters by name."""

        def make(params: list[nn.Parameter]) -> Optimizer:
            # one kernel for the whole step
            fused = has_fused_kernel(self.dense, params[0].device)
            kwargs: dict[str, Any] = {"lr": self.dense_learning_rate, "fused": fused or None}
            return DENSE_OPTIMIZERS[self.dense](params, **kwargs)

        optimizer = KeyedOptimizerWrapper(dict(parameters), make)
        if self.clip_norm is None:
            return optimizer
        return GradientClippingOptimizer(
            optimizer, clipping=GradientClipping.NORM, max_gradient=self.clip_norm
        )
