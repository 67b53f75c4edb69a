"""The layers compute what TorchRec's do, with fewer operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DenseArch, OverArch
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_sharded.model.dense_layers import CrossLayers, DenseLayers, OverLayers
from tests.unit.model.operators import Operators

NUM_INPUTS, BATCH_SIZE = 6, 5
PAIRS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module], tuple[Any, ...]]] = {
    "dense": (DenseLayers, DenseArch, (NUM_INPUTS, [8, 4])),
    "over": (OverLayers, OverArch, (NUM_INPUTS, [8, 4, 1])),
    "cross": (CrossLayers, LowRankCrossNet, (NUM_INPUTS, 3, 4)),
}


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """Return our layers and TorchRec's, each made from the same random numbers."""
    ours, theirs, arguments = PAIRS[kind]
    made = []
    for make in (ours, theirs):
        torch.manual_seed(0)
        made.append(make(*arguments))
        for name, parameter in made[-1].named_parameters():
            if "bias" in name:  # zeros would hide it
                nn.init.normal_(parameter)
    return made[0], made[1]


def trained(layers: nn.Module, dtype: torch.dtype, *, autocast: bool) -> dict[str, Tensor]:
    """Return the output of layers and all gradients."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(BATCH_SIZE, NUM_INPUTS, generator=generator).to(dtype)
    features.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layers(features)
    output.float().square().sum().backward()
    gradients = {name: p.grad for name, p in layers.named_parameters()}
    assert features.grad is not None
    return {"output": output.detach(), "features": features.grad, **gradients}


@pytest.mark.parametrize("kind", PAIRS)
def test_weights_are_torchrecs(kind):
    ours, theirs = pair(kind)
    weights, expected = ours.state_dict(), theirs.state_dict()
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", PAIRS)
def test_fp32_is_torchrecs(kind):
    ours, theirs = (trained(layers, torch.float32, autocast=False) for layers in pair(kind))
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= 1e-6 * expected.norm(), name


@pytest.mark.parametrize("kind", ["dense", "over"])
def test_bf16_is_torchrecs_bit_for_bit(kind):
    ours, theirs = (trained(layers, torch.bfloat16, autocast=True) for layers in pair(kind))
    for name, expected in theirs.items():
        assert ours[name].dtype == expected.dtype, name
        assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cross_layers_stay_in_bf16(dtype):
    """TorchRec's return fp32 as soon as a bias is added."""
    layers, theirs = pair("cross")
    exact = trained(theirs, torch.float32, autocast=False)
    found = trained(layers, dtype, autocast=True)
    assert found["output"].dtype == torch.bfloat16
    for name, expected in exact.items():
        assert found[name].dtype == (dtype if name == "features" else expected.dtype) or (
            name == "output"
        )
        error = (found[name].float() - expected).norm() / expected.norm()
        assert error < 0.02, name


@pytest.mark.parametrize("kind", PAIRS)
def test_weights_are_cast_together(kind):
    ours, theirs = pair(kind)
    copies = []
    for layers in (ours, theirs):
        with Operators() as operators:
            trained(layers, torch.bfloat16, autocast=True)
        copies.append(operators.counts["_to_copy"])
    num_weights = len(list(ours.parameters()))
    # that of the features to bf16 is one, that of the output to fp32 and back are two
    assert copies[0] == 3 + 2
    assert copies[1] >= 3 + 2 * num_weights - 6


def test_cross_layers_have_three_operators():
    layers, _ = pair("cross")
    features = torch.randn(BATCH_SIZE, NUM_INPUTS)
    with torch.no_grad(), Operators() as operators:
        layers(features)
    assert operators.counts["mm"] == operators.counts["addmm"] == 3
    assert operators.counts["addcmul"] == 3
    assert not operators.counts["add"] + operators.counts["mul"]
