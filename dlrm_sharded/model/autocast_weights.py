"""Casts weights to the precision of autocast, all of them in one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd.function import once_differentiable


def in_autocast_precision(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return weights in autocast's precision, or unchanged if autocast is off.

    The weights have one dtype and device. Autocast would cast them, and later their gradients, one
    by one, which takes a host longer than a GPU.
    """
    device_type = weights[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return weights
    dtype = torch.get_autocast_dtype(device_type)
    if torch.compiler.is_compiling():  # a compiler fuses each cast with what reads it
        return [weight.to(dtype) for weight in weights]
    cast: tuple[Tensor, ...] = _CastTogether.apply(dtype, *weights)
    return cast


class _CastTogether(torch.autograd.Function):
    """Casts tensors together, and their gradients back together."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        return tuple(_unflatten_dense_tensors(_flatten_dense_tensors(weights).to(dtype), weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = _flatten_dense_tensors(gradients).to(ctx.dtype)
        return None, *_unflatten_dense_tensors(flat, gradients)
