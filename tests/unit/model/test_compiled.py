"""Layers are compiled where that is asked for, and otherwise go on without if they cannot be."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError
from torch._functorch import config as functorch_config

from dlrm_sharded.model import compiled
from dlrm_sharded.model.compiled import agree_on_compilation, compile_layers


@pytest.fixture
def modes(monkeypatch):
    """Modes that modules were to be compiled in; compiled modules add 1 to what they return."""
    found = []

    def compile_module(module, mode):
        found.append(mode)
        module._compiled_call_impl = lambda features: module.forward(features) + 1

    monkeypatch.setattr(nn.Module, "compile", compile_module)
    return found


@pytest.mark.parametrize(
    ("mode", "is_asked", "expected"),
    [
        (None, True, []),
        ("none", True, []),
        ("default", False, ["default"]),
        ("reduce-overhead", True, ["reduce-overhead"]),
    ],
    ids=["null", "none", "chosen", "named"],
)
def test_layers_are_compiled_in_a_mode(mode, is_asked, expected, modes):
    layers = nn.Identity()
    compile_layers([layers], mode, is_asked=is_asked)
    assert modes == expected
    assert layers(torch.zeros(1)) == len(expected)


@pytest.mark.parametrize("num_calls", [1, 3])
def test_layers_that_do_not_compile_run_as_they_are(num_calls, monkeypatch, caplog):
    """One of three fails; none is compiled from then on, and one warning says why."""
    calls = []

    def compile_module(module, mode):
        def call(features):
            calls.append(mode)
            raise InternalTorchDynamoError("no Triton\nand a long trace")

        module._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", compile_module)
    layers = [nn.Identity() for _ in range(3)]
    compile_layers(layers, "default", is_asked=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(num_calls):
            assert [float(layer(torch.ones(1))) for layer in layers] == [1.0] * 3
    (message,) = caplog.messages
    assert "(InternalTorchDynamoError: no Triton), so they run uncompiled" in message
    assert calls == ["default"]  # it was tried once


def test_a_backward_pass_that_does_not_compile_fails_at_once(monkeypatch):
    """It would fail in the middle of a step otherwise, where nothing can be done."""
    at_once = []

    def compile_module(module, mode):
        def call(features):
            at_once.append(functorch_config.force_non_lazy_backward_lowering)

        module._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", compile_module)
    layers = nn.Identity()
    compile_layers([layers], "default", is_asked=False)
    layers(torch.ones(1))
    assert at_once == [True]
    assert not functorch_config.force_non_lazy_backward_lowering


def test_the_compilers_settings_are_changed_for_a_mode_once(modes, monkeypatch):
    """Changing them takes longer than calling a layer."""
    entered = []

    def patch(settings):
        entered.append(settings)
        return nullcontext()

    monkeypatch.setattr(compiled, "functorch_config", SimpleNamespace(patch=patch))
    layers = [nn.Identity() for _ in range(3)]
    compile_layers(layers, "default", is_asked=False)
    for layer in layers * 10:
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                assert layer.train(mode)(torch.zeros(1)) == 1
    assert len(entered) == 2 * len(layers)


@pytest.mark.parametrize("num_elsewhere", [0, 2])
def test_layers_are_compiled_on_all_ranks_or_on_none(num_elsewhere, modes, rank, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda fewest, op: fewest.clamp_(max=num_elsewhere))
    model = nn.Sequential(nn.Identity(), nn.Identity())
    compile_layers(list(model), "default", is_asked=False)
    agree_on_compilation(model, rank.device)
    assert float(model(torch.zeros(1))) == num_elsewhere
