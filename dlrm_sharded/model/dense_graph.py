"""The dense part of a step as one CUDA graph: forward, backward, and the sum over the ranks.

Without a graph, a host launches each kernel of the dense part, and DDP adds about 50 operators. A
graph is launched by one call. It needs all vectors before it begins, and ends with the exchange of
the gradients. So it overlaps less with the exchanges of vectors, and pays off where the step is
host-bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedTensor

NUM_WARMUP = 3
"""Runs before the recording, in which libraries choose kernels and allocate their workspaces."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Dense features [B, I], vectors of all features [B, sum of D], and labels [B]."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Results of a step for a batch: the mean loss [], logits [B], and the vectors' gradient."""

    loss: Tensor
    logits: Tensor
    gradient: Tensor

    def copied(self) -> Outputs:
        """Return outputs that the next replay does not overwrite."""
        return Outputs(self.loss.clone(), self.logits.clone(), self.gradient)


class DenseGraph(nn.Module):
    """Computes loss and gradients of the dense part at once, on CUDA as a graph that is replayed.

    The graph is recorded in the first step in which `records` is true, and again in the step after
    `release`. Batches of another size, and all batches on a CPU, are computed without a graph, by
    the same operators. The weights' gradients are averaged over the ranks of the job, so DDP must
    not average them again. They hold for one backward pass per step, from the mean loss itself.

    Args:
        compute: returns the mean loss [] and the logits [B] of dense features, vectors and labels.
        weights: parameters that `compute` reads.
        device: device that they are on.
        records: whether to record a graph.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, KeyedTensor, Tensor], tuple[Tensor, Tensor]],
        weights: Sequence[nn.Parameter],
        device: torch.device,
        *,
        records: bool = True,
    ) -> None:
        super().__init__()
        self.records = records
        self._device = device
        self._compute = compute
        self._weights = tuple(weights)
        self._gradients: tuple[Tensor, ...] = ()
        self._sum = torch.empty(0)
        self._recorded: _Recorded | None = None

    def forward(
        self, features: Tensor, pooled: KeyedTensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss [], whose backward pass gives the gradients, and the logits [B].

        Args:
            features: [B, I].
            pooled: vectors of all features, [B, sum of D].
            labels: [B].
        """
        if not self._gradients:
            self._make_gradients()
        vectors = pooled.values()
        step = partial(self._step, pooled.keys(), pooled.length_per_key())
        inputs = (features, vectors, labels)
        if self._recorded is None and self.records and self._device.type == "cuda":
            self._recorded = _record(step, inputs)
        outputs = self._recorded(inputs) if self._recorded else None
        outputs = outputs or step(inputs)
        loss, logits = _AtOnce.apply(vectors, outputs, self._give_gradients)
        return loss, logits

    def share_weights(self) -> None:
        """Give all ranks the weights of rank 0, as DDP does; a collective of all ranks."""
        for weight in self._weights:
            dist.broadcast(weight.detach(), 0)

    def release(self) -> None:
        """Free the recorded graph.

        NCCL waits for all graphs that captured one of its collectives before it ends their group.
        """
        self._recorded = None

    def _make_gradients(self) -> None:
        """Put the gradients of all weights into one tensor, so that one exchange sums them."""
        sizes = [weight.numel() for weight in self._weights]
        self._sum = self._weights[0].new_zeros(sum(sizes))
        pieces = zip(self._sum.split(sizes), self._weights, strict=True)
        self._gradients = tuple(piece.view_as(weight) for piece, weight in pieces)

    def _step(self, keys: list[str], widths: list[int], inputs: Inputs) -> Outputs:
        features, pooled, labels = inputs
        with torch.enable_grad():
            vectors = pooled.detach().requires_grad_()
            loss, logits = self._compute(features, KeyedTensor(keys, widths, vectors), labels)
            with record_function("## backward ##"):
                of_vectors, *gradients = torch.autograd.grad(loss, (vectors, *self._weights))
                torch.cat([gradient.flatten() for gradient in gradients], out=self._sum)
                if dist.is_initialized() and dist.get_world_size() > 1:
                    dist.all_reduce(self._sum)
                    self._sum.div_(dist.get_world_size())
        return Outputs(loss.detach(), logits.detach(), of_vectors)

    def _give_gradients(self) -> None:
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient


def release_graphs(model: nn.Module) -> None:
    """Free the recorded graphs of a model; the job's group cannot end while they exist."""
    for module in model.modules():
        if isinstance(module, DenseGraph):
            module.release()


class _AtOnce(torch.autograd.Function):
    """Returns a loss and logits, and in backward gradients, that were computed before."""

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, outputs: Outputs, give_gradients: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        ctx.gradient, ctx.give_gradients = outputs.gradient, give_gradients
        ctx.mark_non_differentiable(outputs.logits)
        return outputs.loss, outputs.logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, None]:
        ctx.give_gradients()  # only now, because a pipeline drops earlier ones
        return ctx.gradient, None, None


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded graph: the function that replays it, and the tensors that it reads and writes."""

    replay: Callable[[], None]
    inputs: Inputs
    outputs: Outputs

    def __call__(self, inputs: Inputs) -> Outputs | None:
        """Replay the graph with these inputs, and return its outputs; None if the sizes differ."""
        if any(own.shape != new.shape for own, new in zip(self.inputs, inputs, strict=True)):
            return None
        with torch.no_grad():
            for own, new in zip(self.inputs, inputs, strict=True):
                own.copy_(new)
        self.replay()
        return self.outputs.copied()


def _record(step: Callable[[Inputs], Outputs], inputs: Inputs) -> _Recorded:
    """Record a step on copies of its inputs; all ranks do so in the same step."""
    own = (inputs[0].clone(), inputs[1].detach().clone(), inputs[2].clone())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(NUM_WARMUP):
            step(own)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other threads, such as NCCL's watchdog, may go on calling CUDA
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step(own)
    return _Recorded(graph.replay, own, outputs)
