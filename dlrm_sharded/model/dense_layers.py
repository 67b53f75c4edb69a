"""TorchRec's dense layers, with fewer operators for the same results.

The weights have the same names and initial values as in TorchRec, which is not imported here: an
exported model is scored without it. Under autocast, all layers of a part compute in its precision,
including biases and element-wise operations, and their weights are cast together.

Letters: B batch, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dlrm_sharded.model.autocast_weights import in_autocast_precision


class DenseLayers(nn.Module):
    """Layers with ReLU after each, for dense features; see `torchrec.models.dlrm.DenseArch`."""

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = _perceptron_modules([in_features, *layer_sizes], device)
        self._linears = _linear_layers(self)

    def forward(self, features: Tensor) -> Tensor:
        """Return [B, O] for features [B, I]."""
        return torch.relu(_perceptrons(features, self._linears))


class OverLayers(nn.Module):
    """Layers with ReLU between them, from interactions to a logit; see TorchRec's `OverArch`."""

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        *sizes, last = in_features, *layer_sizes
        self.model = nn.ModuleList(
            [_perceptron_modules(sizes, device), nn.Linear(sizes[-1], last, device=device)]
        )
        self._linears = _linear_layers(self)

    def forward(self, features: Tensor) -> Tensor:
        """Return [B, O] for features [B, I]."""
        return _perceptrons(features, self._linears)


class CrossLayers(nn.Module):
    """DCNv2's low-rank cross network, with three operators per layer.

    Under autocast, TorchRec's `LowRankCrossNet` adds biases in fp32, and so computes the rest of a
    layer in fp32.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int) -> None:
        super().__init__()
        shapes = [(in_features, low_rank)] * num_layers, [(low_rank, in_features)] * num_layers
        self.W_kernels, self.V_kernels = (
            nn.ParameterList([nn.init.xavier_normal_(torch.empty(shape)) for shape in of_kind])
            for of_kind in shapes
        )
        self.bias = nn.ParameterList([torch.zeros(in_features) for _ in range(num_layers)])

    def forward(self, input: Tensor) -> Tensor:
        """Return [B, I] for features [B, I]."""
        weights = in_autocast_precision(_weights((self.V_kernels, self.W_kernels, self.bias)))
        crossed: Tensor = _Crossed.apply(input.to(weights[0].dtype), *weights)
        return crossed


class _Crossed(torch.autograd.Function):
    """The layers of a cross network: x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l.

    Autograd would sum gradients in separate operators.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, *weights: Tensor) -> Tensor:
        """Return [B, I] for x_0 [B, I] and all V [R, I], all W [I, R], all b [I]."""
        num_layers = len(weights) // 3
        crossed, saved = first, []
        for layer in range(num_layers):
            down, up, bias = weights[layer::num_layers]
            low = F.linear(crossed, down)
            projected = F.linear(low, up, bias)
            saved += [crossed, low, projected]
            crossed = torch.addcmul(crossed, first, projected)
        ctx.save_for_backward(first, *weights, *saved)
        return crossed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        num_layers = (len(ctx.saved_tensors) - 1) // 6
        first, *others = ctx.saved_tensors
        downs, ups = others[:num_layers], others[num_layers : 2 * num_layers]
        saved = others[3 * num_layers :]
        of_weights: list[list[Tensor]] = [[], [], []]
        of_first: Tensor | None = None
        for layer in reversed(range(num_layers)):
            crossed, low, projected = saved[3 * layer : 3 * layer + 3]
            if of_first is None:
                of_first = gradient * projected
            else:
                of_first.addcmul_(gradient, projected)
            of_projected = gradient * first
            of_low = of_projected @ ups[layer]
            of_layer = of_low.t() @ crossed, of_projected.t() @ low, of_projected.sum(0)
            for of_kind, of_weight in zip(of_weights, of_layer, strict=True):
                of_kind.insert(0, of_weight)
            gradient = torch.addmm(gradient, of_low, downs[layer])
        assert of_first is not None
        return of_first.add_(gradient), *(weight for of_kind in of_weights for weight in of_kind)


def _perceptron_modules(sizes: Sequence[int], device: torch.device | None) -> nn.ModuleDict:
    """Return linear layers of these sizes, with their names in TorchRec's `MLP`."""
    linears = [nn.Linear(*size, device=device) for size in itertools.pairwise(sizes)]
    layers = [nn.ModuleDict({"_linear": linear}) for linear in linears]
    return nn.ModuleDict({"_mlp": nn.ModuleList(layers)})


def _linear_layers(layers: nn.Module) -> tuple[nn.Linear, ...]:
    return tuple(layer for layer in layers.modules() if isinstance(layer, nn.Linear))


def _weights(modules: Iterable[nn.Module]) -> list[Any]:
    """Return modules' own parameters; reading them as attributes takes a host ten times as long."""
    return [weight for module in modules for weight in module._parameters.values()]


def _perceptrons(features: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """Apply linear layers to features, with ReLU between the layers."""
    pairs = iter(in_autocast_precision(_weights(linears)))
    features = F.linear(features, next(pairs), next(pairs))
    for weight in pairs:
        features = F.linear(torch.relu(features), weight, next(pairs))
    return features
