"""The memory of the dense part of a model, found by running it on tensors without data.

The model is built and trained for one step in PyTorch's fake mode, in which tensors have shapes but
no memory. So layers of any kind are covered, and models larger than the host can be traced.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.plans.tables import Table, tables_by_feature

log = logging.getLogger(__name__)

_NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
"""The errors that fake mode raises if a model's shapes or branches depend on values."""


@dataclass(frozen=True, slots=True)
class DenseMemory:
    """Memory of the dense part of a model on every rank, in bytes.

    Args:
        parameter_bytes: weights; their gradients take as much again.
        buffer_bytes: tensors that are not trained.
        activation_bytes: peak within a step of everything else: pooled vectors as the tables give
            them, activations, and the gradients of both.
        has_graphs: whether, on a GPU, CUDA graphs hold the activations, so that nothing else can
            use their memory.
    """

    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    has_graphs: bool = False


def trace_dense(
    build: Callable[[torch.device], Dlrm],
    tables: Sequence[Table],
    *,
    num_dense: int,
    local_batch_size: int,
) -> DenseMemory:
    """Build the model in fake mode and train it for one step.

    The model looks nothing up: its pooled vectors are a leaf that needs a gradient. If it cannot
    run without data, a warning is logged, and its activations count as 0 bytes.

    Args:
        build: builds the model on a device.
        local_batch_size: samples of one rank.
    """
    with _fake_dense_part(build, tables, num_dense, local_batch_size) as (model, batch):
        parameters = [p for p in model.parameters() if p.requires_grad]
        memory = DenseMemory(
            parameter_bytes=sum(p.nbytes for p in parameters),
            buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
            activation_bytes=0,
            has_graphs=model.has_graphs,
        )
        try:
            peak_bytes = _step_peak_bytes(model, batch, parameters)
        except _NEEDS_DATA as error:
            log.warning(
                "the memory of the model's activations is not known and counts as 0, because the "
                "model cannot run without data: %s",
                error,
            )
            return memory
    return dataclasses.replace(memory, activation_bytes=peak_bytes)


@contextmanager
def _fake_dense_part(
    build: Callable[[torch.device], Dlrm],
    tables: Sequence[Table],
    num_dense: int,
    local_batch_size: int,
) -> Iterator[tuple[Dlrm, Batch]]:
    """Yield a model and a batch without memory; the model's lookup returns pooled vectors.

    Within the block, new tensors have no memory either.
    """
    model = build(torch.device("meta"))
    model.autocast_device = "cpu"
    model.add_module("sparse_arch", _PooledVectors(tables, local_batch_size))
    model.dense_graph = None  # the dense part is trained by autograd, part by part
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            module._compiled_call_impl = None  # compiled layers would be compiled here
            _move_to_fake_cpu(module)
        yield (
            model,
            Batch(
                dense_features=torch.empty(local_batch_size, num_dense),
                sparse_features=KeyedJaggedTensor(
                    keys=[], values=torch.empty(0), lengths=torch.empty(0, dtype=torch.int32)
                ),
                labels=torch.empty(local_batch_size),
            ),
        )


class _PooledVectors(nn.Module):
    """Returns pooled vectors as a leaf that needs a gradient, without looking anything up.

    Args:
        num_samples: B, of one rank.
    """

    def __init__(self, tables: Sequence[Table], num_samples: int) -> None:
        super().__init__()
        by_feature = tables_by_feature(tables)
        self._names = list(by_feature)
        self._dims = [table.embedding_dim for table in by_feature.values()]
        self._shape = (num_samples, sum(self._dims))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled vectors, [B, sum of the features' dims]."""
        return KeyedTensor(self._names, self._dims, torch.empty(self._shape).requires_grad_())


def _move_to_fake_cpu(module: nn.Module) -> None:
    """Replace a module's meta tensors by fake CPU ones, because autocast ignores meta tensors."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            module._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _step_peak_bytes(model: nn.Module, batch: Batch, parameters: Iterable[Tensor]) -> int:
    """Return the peak of a forward and backward pass, without the gradients of parameters."""
    with _LiveBytes() as live:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda p: live.forget(p.grad))
        loss, _ = model(batch)
        loss.backward()
    return live.peak_bytes


class _LiveBytes(TorchDispatchMode):
    """Sums the sizes of the storages that operations return, until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[int, int] = {}
        self._live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(_storage(t)) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(_storage(tensor)) not in inputs:
                self._add(_storage(tensor))
        return result

    def forget(self, tensor: Tensor | None) -> None:
        """Stop counting a tensor."""
        if tensor is not None:
            self._release(id(_storage(tensor)))

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._release, key).atexit = False

    def _release(self, key: int) -> None:
        self._live_bytes -= self._bytes.pop(key, 0)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
