"""The evaluation against its definitions, in a job of one process."""

import math

import pytest
import torch
from torch import Tensor, nn

from dlrm_sharded.files.errors import DivergenceError
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.metrics import Evaluation, Evaluator


def evaluate(rank: Rank, logits: Tensor, labels: Tensor, num_batches: int = 1) -> Evaluation:
    evaluator = Evaluator(rank.device)
    for part in range(num_batches):
        evaluator.update(
            logits[part::num_batches].to(rank.device), labels[part::num_batches].to(rank.device)
        )
    return evaluator.compute()


def auroc(logits: Tensor, labels: Tensor) -> float:
    """Share of (positive, negative) pairs in the right order; ties count half."""
    difference = logits[labels == 1][:, None] - logits[labels == 0][None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


def normalized_entropy(logits: Tensor, labels: Tensor) -> float:
    logits, labels = logits.double(), labels.double()
    predicted = torch.where(labels == 1, logits.sigmoid(), 1 - logits.sigmoid())
    rate = float(labels.mean())
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    return float(-predicted.log().mean()) / entropy


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("levels", [10**6, 20, 2, 1], ids=lambda n: f"{n}_values")
def test_equals_plain_computation(rank, levels, num_batches):
    """The fewer different predictions, the more ties."""
    generator = torch.Generator().manual_seed(levels)
    labels = (torch.rand(500, generator=generator) < 0.3).float()
    scores = torch.randn(500, generator=generator) + labels
    logits = (scores.sigmoid() * levels).floor() / levels * 4 - 3
    found = evaluate(rank, logits, labels, num_batches)
    assert found.auroc == pytest.approx(auroc(logits, labels), abs=1e-5)
    assert found.normalized_entropy == pytest.approx(normalized_entropy(logits, labels), rel=1e-5)
    assert found.num_samples == 500
    log_loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert found.loss == pytest.approx(float(log_loss), rel=1e-5)
    calibration = float(logits.double().sigmoid().mean() / labels.double().mean())
    assert found.calibration == pytest.approx(calibration, rel=1e-9)


@pytest.mark.parametrize(("label", "calibration"), [(0.0, None), (1.0, 0.5)])
def test_one_class_has_no_auroc(rank, label, calibration):
    """Predictions of 1/2 have a loss, and by positives a calibration."""
    found = evaluate(rank, torch.zeros(8), torch.full((8,), label))
    assert found == Evaluation(None, None, 8, pytest.approx(math.log(2)), calibration)


def test_no_samples_have_no_metric(rank):
    assert evaluate(rank, torch.zeros(0), torch.zeros(0)) == Evaluation(None, None, 0, None, None)


@pytest.mark.parametrize("logit", [math.nan, -math.inf])
@pytest.mark.parametrize("other_label", [0.0, 1.0], ids=["both classes", "one class"])
def test_predictions_that_are_not_finite(rank, logit, other_label):
    labels = torch.tensor([1.0, other_label])
    with pytest.raises(
        DivergenceError, match=r"the log loss of the evaluation is (nan|inf); lower"
    ):
        evaluate(rank, torch.tensor([logit, 1.0]), labels)


def test_an_update_copies_nothing_from_the_host(rank, monkeypatch):
    """On a GPU each such copy would wait for the device in every batch."""
    evaluator = Evaluator(rank.device)
    logits, labels = torch.linspace(-1, 1, 8), torch.arange(8.0) % 2

    def copied(*args: object, **keys: object) -> None:
        raise AssertionError("copied from the host")

    with monkeypatch.context() as patch:
        for name in ("tensor", "as_tensor", "scalar_tensor"):
            patch.setattr(torch, name, copied)
        patch.setattr(Tensor, "new_tensor", copied)
        evaluator.update(logits, labels)
    assert evaluator.compute().num_samples == 8
