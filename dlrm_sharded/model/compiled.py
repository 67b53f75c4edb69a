"""Compiles layers with torch.compile; `auto` leaves layers that cannot be compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from dlrm_sharded.files.errors import ConfigError

log = logging.getLogger(__name__)

AUTO, AUTO_MODE = "auto", "default"
"""Mode that decides by device, and the mode that it takes on CUDA."""

MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that replay each of the layers as a CUDA graph."""

COMPILE_MODES = (AUTO, AUTO_MODE, *MODES_WITH_GRAPHS, "max-autotune-no-cudagraphs")

BACKWARD_AT_ONCE = {
    name: True
    for name in ("force_non_lazy_backward_lowering",)
    if hasattr(functorch_config, name)  # torch 2.11 to 2.14 have it
}


def check_compile_mode(mode: str | None, *, in_graph: bool) -> None:
    """Raise ConfigError unless a mode is known; None compiles nothing.

    Args:
        in_graph: whether the layers are replayed as part of a larger CUDA graph.
    """
    if mode is not None and mode not in COMPILE_MODES:
        raise ConfigError(
            f"model.compile_mode is {mode!r}; known: null, {', '.join(COMPILE_MODES)}"
        )
    if in_graph and mode in MODES_WITH_GRAPHS:
        raise ConfigError(
            f"model.compile_mode={mode} replays the layers as CUDA graphs, which model.dense_graph "
            "does for all of them; take auto or max-autotune-no-cudagraphs"
        )


def compile_layers(layers: Sequence[nn.Module], mode: str | None, device: torch.device) -> None:
    """Let layers be compiled when they first run.

    `auto` compiles on CUDA only: on a CPU, calling compiled layers takes as long as the operators
    that it saves.
    """
    if mode is None or (mode == AUTO and device.type != "cuda"):
        return
    for module in layers:
        module.compile(mode=AUTO_MODE if mode == AUTO else mode)
    if mode == AUTO:
        for module in layers:
            module._compiled_call_impl = _CompiledOrNot(module, layers)


class _CompiledOrNot:
    """Calls a compiled module, until it or another one of its model turns out not to compile.

    A host may lack a compiler or the headers that one needs: they are not part of torch. The
    backward pass is compiled with the forward pass, and not when it is needed, where an error
    could no longer be answered.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._module = module
        self._compiled: Any = module._compiled_call_impl
        self._layers = layers

    def __call__(self, *args: Any) -> Any:
        try:
            with functorch_config.patch(BACKWARD_AT_ONCE):
                return self._compiled(*args)
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException  # takes seconds to load

            if not isinstance(error, TorchDynamoException):
                raise
            log.warning(
                "the dense layers are not compiled, as this failed (%s: %s); "
                "model.compile_mode=null does not try it",
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
        for module in self._layers:
            module._compiled_call_impl = None
        return self._module(*args)
