"""The dense part of a model and of its training: priced for a GPU, or measured on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.datasets.utils import Batch

from dlrm_sharded.dense.gpu_prices import gpu_dense_times
from dlrm_sharded.dense.pooled_vectors import batch_without_ids
from dlrm_sharded.dense.times import measure_dense
from dlrm_sharded.dense.trace import NEEDS_DATA, DenseMemory, trace_dense
from dlrm_sharded.dense.work_trace import DenseWork, trace_dense_work
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import DENSE_STATE_TENSORS, OptimizerConfig
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.devices import allow_tf32
from dlrm_sharded.step.parts import DenseTimes


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense part of a model and of its training.

    Args:
        new_model: builds the model from tables, the number of dense features and a device.
        bf16: whether its matrix products are of bfloat16 numbers.
        seed: of the weights.
        compiled: whether its layers are compiled on GPUs.
    """

    new_model: Callable[..., Dlrm]
    num_dense: int
    optimizer: OptimizerConfig
    bf16: bool
    seed: int = 0
    compiled: bool = False

    def build(self, tables: Sequence[Table], device: torch.device) -> Dlrm:
        """Build the model on a device; its tables have no memory."""
        torch.manual_seed(self.seed)
        return self.new_model(tables, self.num_dense, device=device)

    @property
    def state_tensors(self) -> int:
        """Number of tensors that the optimizer keeps for each weight."""
        return DENSE_STATE_TENSORS[self.optimizer.dense]

    def trace(self, tables: Sequence[Table], local_batch_size: int) -> DenseMemory:
        """Count the memory of a step on one rank."""
        return trace_dense(
            lambda device: self.build(tables, device),
            tables,
            num_dense=self.num_dense,
            local_batch_size=local_batch_size,
        )

    def work(self, tables: Sequence[Table], local_batch_size: int) -> DenseWork:
        """Count the operations of a step on one rank.

        Raises:
            ConfigError: the model cannot run without data.
        """
        try:
            return trace_dense_work(
                lambda device: self.build(tables, device),
                tables,
                num_dense=self.num_dense,
                local_batch_size=local_batch_size,
            )
        except NEEDS_DATA as error:
            raise ConfigError(f"the model cannot be priced: it needs data: {error}") from error

    def priced(self, gpu: GpuSpec, work: DenseWork) -> DenseTimes:
        """Return the times of the work on a GPU."""
        return gpu_dense_times(
            work,
            gpu,
            bf16=self.bf16,
            state_tensors=self.state_tensors,
            compiled=self.compiled,
        )

    def measured(
        self, tables: Sequence[Table], batches: Sequence[Batch], device: torch.device, **limits: Any
    ) -> DenseTimes:
        """Return the times of one rank on a device, see `measure_dense`."""
        if device.type == "cuda":
            allow_tf32(True)  # as by default in a training
        return measure_dense(
            self.build(tables, device),
            tables,
            [batch.to(device) for batch in batches],
            self.optimizer,
            **limits,
        )

    def random_batch(self, num_samples: int) -> Batch:
        """Return a batch without ids, as the dense part looks nothing up."""
        generator = torch.Generator().manual_seed(0)
        features = torch.rand(num_samples, self.num_dense, generator=generator)
        labels = torch.randint(2, (num_samples,), generator=generator).float()
        return batch_without_ids(features, labels)
