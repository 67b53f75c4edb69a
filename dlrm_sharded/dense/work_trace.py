"""Counts the operations of a model's dense part by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dlrm_sharded.dense.trace import fake_dense_part
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.marked_layers import MarkedLayers
from dlrm_sharded.plans.tables import Table

Kernels = NDArray[np.float64]
"""[K, 2], floating-point operations of the matrix products of each kernel, and the bytes that it
reads and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWork:
    """Kernels of the dense part in one step on one rank, see `parts.DenseTimes`.

    Args:
        gradient_bytes: size of the gradients, and likewise of the weights.
    """

    bottom_forward: Kernels
    top_forward: Kernels
    top_backward: Kernels
    bottom_backward: Kernels
    gradient_bytes: int


def trace_dense_work(
    build: Callable[[torch.device], Dlrm],
    tables: Sequence[Table],
    *,
    num_dense: int,
    local_batch_size: int,
) -> DenseWork:
    """Train the dense part for one step without data, and count what it does.

    Args:
        build: builds the model on a device.
        local_batch_size: samples of one rank.

    Raises:
        torch's errors of fake mode (`dense_trace.NEEDS_DATA`): shapes depend on values.
    """
    with fake_dense_part(build, tables, num_dense, local_batch_size) as (model, batch):
        counter = _Counter()
        model.add_module("dense_arch", MarkedLayers(model.dense_arch, counter.mark))
        with counter:
            loss, _ = model(batch)
            counter.mark()
            loss.backward()
            counter.mark()
        gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    before, bottom_forward, top_forward, top_backward, bottom_backward = counter.phases
    return DenseWork(
        bottom_forward=np.array(bottom_forward),
        top_forward=np.array(before + top_forward),
        top_backward=np.array(top_backward),
        bottom_backward=np.array(bottom_backward),
        gradient_bytes=gradient_bytes,
    )


class _Counter(TorchDispatchMode):
    """Notes (operations, bytes) of every kernel, in phases that end at marks."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[list[tuple[float, float]]] = []
        self._phase: list[tuple[float, float]] = []

    def mark(self) -> None:
        """End a phase and begin the next one."""
        self.phases.append(self._phase)
        self._phase = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_kernel(func):
            return result
        touched = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        flop = 0.0
        if func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket]
            flop = float(count(*args, **(kwargs or {}), out_val=result))
        self._phase.append((flop, float(sum(tensor.nbytes for tensor in touched))))
        return result


def _is_kernel(func: Any) -> bool:
    """Return whether an operation computes, rather than allocates or views memory.

    Operators of `prim` ask what a tensor is, such as its device, which fake mode does often.
    """
    if func._schema.name.startswith(("aten::empty", "prim::")):
        return False
    aliases = [returned.alias_info for returned in func._schema.returns]
    return all(alias is None or alias.is_write for alias in aliases)
