"""Compiles layers with torch.compile; `auto` leaves layers that cannot be compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dlrm_sharded.files.errors import ConfigError

log = logging.getLogger(__name__)

AUTO, AUTO_MODE = "auto", "default"
"""Mode that decides by device, and the mode that it takes on CUDA."""

COMPILE_MODES = (
    *(AUTO, AUTO_MODE, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
)
"""Modes of torch.compile and `auto`; the third and fourth replay the layers as CUDA graphs."""


def check_compile_mode(mode: str | None) -> None:
    """Raise ConfigError unless a mode is known; None compiles nothing."""
    if mode is not None and mode not in COMPILE_MODES:
        raise ConfigError(
            f"model.compile_mode is {mode!r}; known: null, {', '.join(COMPILE_MODES)}"
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

    A host may lack a compiler or the headers that one needs: they are not part of torch.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._module = module
        self._compiled: Any = module._compiled_call_impl
        self._layers = layers

    def __call__(self, *args: Any) -> Any:
        try:
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
