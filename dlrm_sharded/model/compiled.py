"""Compiles layers with torch.compile; only if the user asks for it, is a failure an error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config

from dlrm_sharded.files.errors import ConfigError, check_choice

log = logging.getLogger(__name__)

NOT_COMPILED = "none"
"""Mode in which layers are not compiled."""

MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that replay each layer as a CUDA graph."""

COMPILE_MODES = (NOT_COMPILED, "default", *MODES_WITH_GRAPHS, "max-autotune-no-cudagraphs")

BACKWARD_AT_ONCE = {"force_non_lazy_backward_lowering": True}


def check_compile_mode(mode: str | None, *, in_graph: bool) -> None:
    """Raise ConfigError unless a mode is known, or None.

    Args:
        in_graph: whether the layers are replayed as part of a larger CUDA graph.
    """
    if mode is not None:
        check_choice("model.compile_mode", mode, COMPILE_MODES)
    if in_graph and mode in MODES_WITH_GRAPHS:
        raise ConfigError(
            f"model.compile_mode={mode} replays the layers as CUDA graphs, which model.dense_graph "
            "does for all of them; take default or max-autotune-no-cudagraphs"
        )


def compile_layers(layers: Sequence[nn.Module], mode: str | None, *, is_asked: bool = True) -> None:
    """Make layers compile when they first run.

    Args:
        is_asked: whether the user chose the mode, so that a layer that does not compile is an
            error; otherwise the layers then run uncompiled.
    """
    if mode in (None, NOT_COMPILED):
        return
    for module in layers:
        module.compile(mode=mode)
    if not is_asked:
        for module in layers:
            module._compiled_call_impl = _CompiledOrNot(module, layers)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run the layers of a model uncompiled within the block.

    Compiling layers again for evaluation would take longer than it saves.
    """
    calls = {module: module._compiled_call_impl for module in _compiled(model)}
    try:
        _leave_uncompiled(calls)
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call


def agree_on_compilation(model: nn.Module, device: torch.device) -> None:
    """Compile no layers if any rank failed to; all ranks call this after a first step.

    Otherwise, ranks might send the gradients of a step in different orders.
    """
    compiled = _compiled(model)
    fewest = torch.tensor(len(compiled), device=device)
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    if int(fewest) < len(compiled):
        _leave_uncompiled(compiled)


def _compiled(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def _leave_uncompiled(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module._compiled_call_impl = None


class _CompiledOrNot:
    """Calls a compiled module until it, or another one of the model, fails to compile.

    A host may lack a compiler or the headers that one needs: they are not part of torch. The
    backward pass is compiled with the forward pass, not when it first runs, because an error
    could no longer be handled there.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._module = module
        self._compiled: Any = module._compiled_call_impl
        self._layers = layers
        self._compiled_for: set[tuple[bool, bool]] = set()

    def __call__(self, *args: Any) -> Any:
        # Entering the patch takes longer than calling a small layer.
        mode = self._module.training, torch.is_grad_enabled()
        is_compiled = mode in self._compiled_for
        try:
            with nullcontext() if is_compiled else functorch_config.patch(BACKWARD_AT_ONCE):
                result = self._compiled(*args)
            self._compiled_for.add(mode)
            return result
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException  # takes seconds to load

            if not isinstance(error, TorchDynamoException):
                raise
            log.warning(
                "compiling the dense layers failed (%s: %s), so they run uncompiled; "
                "model.compile_mode=none does not try it",
                type(error).__name__,
                str(error).strip().partition("\n")[0],
            )
        _leave_uncompiled(self._layers)
        return self._module(*args)
