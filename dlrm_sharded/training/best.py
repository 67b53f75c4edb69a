"""The best evaluation of a run, by one metric."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass

from dlrm_sharded.training.metrics import Evaluation

IS_BETTER = {"auroc": operator.gt, "normalized_entropy": operator.lt, "loss": operator.lt}
"""Tells, for each metric of an `Evaluation`, whether the first of two values is better."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far.

    Args:
        metric: one of `IS_BETTER`.
        value: its best value so far; None if there is none.
        step: number of steps before that evaluation.
        num_worse: number of evaluations since then, none of which was better.
    """

    metric: str
    value: float | None = None
    step: int | None = None
    num_worse: int = 0

    def after(self, evaluation: Evaluation, step: int) -> Best:
        """Return the best evaluation after a later one, at `step`, is counted."""
        value = getattr(evaluation, self.metric)
        if value is None or not (self.value is None or IS_BETTER[self.metric](value, self.value)):
            return dataclasses.replace(self, num_worse=self.num_worse + 1)
        return Best(self.metric, value, step)

    def __str__(self) -> str:
        if self.value is None:
            return f"no {self.metric} yet"
        return f"best {self.metric} {self.value:.4f} at step {self.step}"
