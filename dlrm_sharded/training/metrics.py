"""Validation metrics over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.classification import BinaryAUROC


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well the model ranks and how well it is calibrated; None without both classes.

    Args:
        normalized_entropy: log loss over the entropy of the base rate (He et al., ADKDD 2014,
            sec. 2); below 1 is better than always predicting the base rate.
    """

    auroc: float | None
    normalized_entropy: float | None
    num_samples: int


class Evaluator:
    """Collects predictions on each rank, and evaluates those of all ranks together."""

    def __init__(self, device: torch.device) -> None:
        self._auroc = BinaryAUROC(thresholds=None, validate_args=False).to(device)
        # Sum of log losses, number of positives, number of samples.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add predictions of this rank: logits [B], labels [B] of 0 and 1."""
        # In fp32 the sigmoid of equal logits differs in the last bit between SIMD lanes and the
        # remainder; rounded from fp64, ties stay ties.
        self._auroc.update(logits.double().sigmoid().float(), labels.int())
        log_loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        self._sums += torch.stack(
            [log_loss.double(), labels.double().sum(), labels.new_tensor(len(labels)).double()]
        )

    def compute(self) -> Evaluation:
        """Return the metrics over all ranks, which call this together."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        log_loss, positives, count = sums.tolist()
        if positives in (0, count):
            return Evaluation(auroc=None, normalized_entropy=None, num_samples=int(count))
        rate = torch.tensor(positives / count, dtype=torch.float64)
        entropy = float(-(rate * rate.log() + (1 - rate) * (1 - rate).log()))
        return Evaluation(
            auroc=float(self._auroc.compute()),
            normalized_entropy=log_loss / count / entropy,
            num_samples=int(count),
        )
