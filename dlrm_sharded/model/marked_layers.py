"""Layers that tell when they begin and end."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class MarkedLayers(nn.Module):
    """Calls a function when layers begin and end forward, and when their backward pass begins.

    Args:
        layers: take and return one tensor.
    """

    def __init__(self, layers: nn.Module, mark: Callable[[], None]) -> None:
        super().__init__()
        self.layers = layers
        self.mark = mark

    def forward(self, features: Tensor) -> Tensor:
        """Return what the layers return."""
        self.mark()
        output: Tensor = self.layers(features)
        self.mark()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.mark())
        return output
