"""Adagrad is torch's, with fewer operators."""

import copy

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm_sharded.model.dense_adagrad import DenseAdagrad
from tests.unit.model.operators import Operators

RATE = 0.1
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,), (2, 5))
    ]


def set_gradients(of: list[nn.Parameter], step: int, *, missing: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, weight in enumerate(of):
        gradient = torch.randn(weight.shape, generator=generator)
        gradient[0] = 0.0  # neither the root of the sum nor the gradient is above 0
        weight.grad = None if number == missing else gradient


def assert_equal(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@FUSED
def test_weights_are_torchs(fused):
    ours, theirs = weights(), weights()
    optimizer = DenseAdagrad(ours, lr=RATE, fused=fused)
    expected = torch.optim.Adagrad(theirs, lr=RATE)
    for step, missing in enumerate([None, None, 1, None]):
        optimizer.param_groups[0]["lr"] = expected.param_groups[0]["lr"] = RATE / (1 + step)
        for of, by in ((ours, optimizer), (theirs, expected)):
            set_gradients(of, step, missing=missing)
            by.step()
    assert_equal(ours, theirs)
    found, states = optimizer.state_dict()["state"], expected.state_dict()["state"]
    for number, state in states.items():
        assert found[number].keys() == state.keys()
        assert float(found[number]["step"]) == float(state["step"])
        torch.testing.assert_close(found[number]["sum"], state["sum"])


@FUSED
@pytest.mark.parametrize("keyed", [True, False], ids=["in_place", "anew"])
def test_goes_on_from_torchs_state(fused, keyed):
    """TorchRec loads into the tensors of a state, and torch makes it anew."""
    theirs = weights()
    expected = torch.optim.Adagrad(theirs, lr=RATE)
    set_gradients(theirs, 0)
    expected.step()
    ours = [nn.Parameter(weight.detach().clone()) for weight in theirs]
    optimizer = DenseAdagrad(ours, lr=RATE, fused=fused)
    if keyed:
        names = [str(number) for number in range(len(ours))]
        wrapped = KeyedOptimizerWrapper(
            dict(zip(names, ours, strict=True)), lambda parameters: optimizer
        )
        states = expected.state_dict()["state"]
        wrapped.load_state_dict({"state": {str(number): s for number, s in states.items()}})
    else:
        state = copy.deepcopy(expected.state_dict())
        state["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(state)
    for step in (1, 2):
        for of, by in ((ours, optimizer), (theirs, expected)):
            set_gradients(of, step)
            by.step()
    assert_equal(ours, theirs)
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0] * len(ours)


@FUSED
def test_operators_of_a_step_do_not_grow_with_the_weights(fused):
    ours = weights()
    optimizer = DenseAdagrad(ours, lr=RATE, fused=fused)
    set_gradients(ours, 0)
    with Operators() as operators:
        optimizer.step()
    of_device = (
        ["_fused_adagrad_"]
        if fused
        else ["_foreach_addcmul_", "_foreach_sqrt", "_foreach_add_", "_foreach_addcdiv_"]
    )
    assert operators.counts == {"add_": 1, **dict.fromkeys(of_device, 1)}
