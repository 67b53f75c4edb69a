"""The dense part of a case: priced for GPUs, and measured on the CPUs of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.advice.machines import Machine
from dlrm_sharded.dense.gpu_prices import DENSE_ERROR, gpu_dense_times
from dlrm_sharded.dense.times import measure_dense
from dlrm_sharded.dense.trace import NEEDS_DATA
from dlrm_sharded.dense.work import DenseWork
from dlrm_sharded.dense.work_trace import trace_dense_work
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import DENSE_STATE_TENSORS, OptimizerConfig
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.process import threads_of_a_rank
from dlrm_sharded.step.parts import DenseTimes


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense part of a model and of its training.

    Args:
        build: builds the model for some tables on a device.
        bf16: whether its matrix products are of bfloat16 numbers.
    """

    build: Callable[[Sequence[Table], torch.device], Dlrm]
    num_dense: int
    optimizer: OptimizerConfig
    bf16: bool

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
                state_tensors=DENSE_STATE_TENSORS[self.optimizer.dense],
            )
        except NEEDS_DATA as error:
            raise ConfigError(f"the model cannot be priced: it needs data: {error}") from error

    def priced(self, machine: Machine, work: DenseWork) -> DenseTimes:
        """Return the times of the work on a GPU."""
        assert machine.spec is not None
        return gpu_dense_times(work, machine.spec, bf16=self.bf16)

    def measured(
        self, tables: Sequence[Table], local_batch_size: int, *, ranks_per_host: int
    ) -> DenseTimes:
        """Return the times of one rank here, with the threads that it has beside the others."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_of_a_rank(ranks_per_host))
        torch.manual_seed(0)
        model = self.build(tables, torch.device("cpu"))
        batch = _random_batch(self.num_dense, local_batch_size)
        return measure_dense(model, tables, [batch], self.optimizer)


def error_of_dense(machine: Machine) -> float:
    """Return the expected relative error of the dense part's times."""
    return DENSE_ERROR if machine.is_gpu else 0.0


def _random_batch(num_dense: int, num_samples: int) -> Batch:
    """Return a batch without ids, as the dense part looks nothing up."""
    return Batch(
        dense_features=torch.rand(num_samples, num_dense),
        sparse_features=KeyedJaggedTensor(
            keys=[], values=torch.empty(0), lengths=torch.empty(0, dtype=torch.int32)
        ),
        labels=torch.randint(2, (num_samples,)).float(),
    )
