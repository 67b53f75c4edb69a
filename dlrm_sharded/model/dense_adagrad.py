"""Adagrad for dense weights, in as few operators as a device allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad

FUSED_KERNELS = {"sgd": "_fused_sgd_", "adagrad": "_fused_adagrad_", "adam": "_fused_adam_"}
"""Operators of torch that update all weights at once."""


class DenseAdagrad(Adagrad):
    """torch's Adagrad in two operators per step if there is a fused kernel, and five if not.

    torch counts the steps of each weight in a separate operator. Here, the counts of all weights
    are in one tensor; the state has the same names and shapes as torch's.

    Args:
        fused: whether torch has a fused kernel for the weights' device.
        eps: is added to the denominators; the default is that of torch's Adagrad.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], *, lr: float, fused: bool | None, eps: float = 1e-10
    ) -> None:
        super().__init__(list(weights), lr=lr, fused=fused, foreach=not fused, eps=eps)
        self._tie_step_counts()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of this or torch's optimizer."""
        super().load_state_dict(state_dict)
        self._tie_step_counts()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights; there is no `closure`."""
        (group,) = self.param_groups
        weights, gradients = group["params"], [weight.grad for weight in group["params"]]
        if any(gradient is None for gradient in gradients):  # torch leaves such weights
            super().step()
            return
        self._step_counts.add_(1)
        if group["fused"]:
            torch._fused_adagrad_(
                *(weights, gradients, self._sums, self._counts),
                lr=group["lr"],
                lr_decay=0.0,
                weight_decay=0.0,
                eps=group["eps"],
                maximize=False,
            )
            return
        torch._foreach_addcmul_(self._sums, gradients, gradients)
        roots = torch._foreach_sqrt(self._sums)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(weights, gradients, roots, value=-group["lr"])

    def _tie_step_counts(self) -> None:
        """Move the step counts into one tensor; the state holds views of it."""
        (group,) = self.param_groups
        states = [self.state[weight] for weight in group["params"]]
        self._sums = [state["sum"] for state in states]
        self._step_counts = torch.stack([state["step"] for state in states])
        self._counts = list(self._step_counts.unbind())
        for state, count in zip(states, self._counts, strict=True):
            state["step"] = count


def has_fused_kernel(optimizer: str, device: torch.device) -> bool:
    """Return whether torch has a kernel by which a dense optimizer updates all weights at once.

    The kernel of Adagrad on CUDA came with torch 2.13.
    """
    if device.type not in ("cpu", "cuda"):
        return False
    operator = f"aten::{FUSED_KERNELS[optimizer]}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, device.type.upper())
