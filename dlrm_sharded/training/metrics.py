"""Validation metrics over all ranks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm_sharded.files.errors import AGAINST_DIVERGENCE, DivergenceError
from dlrm_sharded.ranks.agreement import as_reported_by_rank_zero

log = logging.getLogger(__name__)

CHANCE_MARGIN = 0.01
"""Distance of the AUROC from 0.5 up to which the model counts as no better than chance."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Quality of the predictions.

    Args:
        auroc: area under the ROC curve; None unless both classes occur.
        normalized_entropy: log loss divided by the entropy of the base rate (He et al., ADKDD 2014,
            sec. 2); values below 1 are better than always predicting the base rate. None unless
            both classes occur.
        loss: mean log loss; None without samples.
        calibration: mean prediction divided by the mean label; None without positives.
    """

    auroc: float | None
    normalized_entropy: float | None
    num_samples: int
    loss: float | None = None
    calibration: float | None = None

    def __str__(self) -> str:
        named = {
            "loss": self.loss,
            "AUROC": self.auroc,
            "normalized entropy": self.normalized_entropy,
        }
        values = [f"{name} {value:.4f}" for name, value in named.items() if value is not None]
        return ", ".join([*values, f"on {self.num_samples:,} samples"])


class Evaluator:
    """Collects the predictions of each rank and evaluates them together."""

    def __init__(self, device: torch.device) -> None:
        from torchmetrics.classification import BinaryAUROC  # loads matplotlib, for half a second

        self._auroc = BinaryAUROC(thresholds=None, validate_args=False).to(device)
        # Sums of log losses, of labels and of predictions.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._num_samples = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add predictions of this rank, as logits [B] and labels [B] of 0 and 1."""
        # In fp32 the sigmoid of equal logits differs in the last bit between SIMD lanes and the
        # remainder; rounded from fp64, ties stay ties.
        predictions = logits.double().sigmoid()
        self._auroc.update(predictions.float(), labels.int())
        log_loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self._sums += torch.stack([log_loss.double(), labels.double().sum(), predictions.sum()])
        self._num_samples += len(labels)  # a copy to the device would wait for it in every batch

    def compute(self) -> Evaluation:
        """Return the evaluation of all ranks' predictions; all ranks call this together.

        Raises:
            DivergenceError: predictions are not finite; all ranks raise it.
        """
        sums = torch.cat([self._sums, self._sums.new_tensor([self._num_samples])])
        dist.all_reduce(sums)
        log_loss, positives, predicted, count = sums.tolist()
        if not math.isfinite(log_loss):
            raise as_reported_by_rank_zero(
                DivergenceError(
                    f"the log loss of the evaluation is {log_loss}; {AGAINST_DIVERGENCE}; if the "
                    "losses of the training are small, look for such values in the validation data"
                )
            )
        loss = log_loss / count if count else None
        calibration = predicted / positives if positives else None
        if positives in (0, count):
            return Evaluation(None, None, int(count), loss, calibration)
        rate = torch.tensor(positives / count, dtype=torch.float64)
        entropy = float(-(rate * rate.log() + (1 - rate) * (1 - rate).log()))
        return Evaluation(
            auroc=float(self._auroc.compute()),
            normalized_entropy=log_loss / count / entropy,
            num_samples=int(count),
            loss=loss,
            calibration=calibration,
        )


def log_evaluation(evaluation: Evaluation, step: int) -> None:
    """Log an evaluation after a step, and warn of one that ranks no better than chance."""
    log.info("validation after step %d: %s", step, evaluation)
    auroc = evaluation.auroc
    if auroc is not None and abs(auroc - 0.5) < CHANCE_MARGIN:
        log.warning(
            "AUROC is %.4f at step %d: the model ranks no better than chance; train longer, or "
            "check the learning rates, and that labels and features match",
            auroc,
            step,
        )
