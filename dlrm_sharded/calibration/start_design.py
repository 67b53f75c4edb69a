"""Chooses which plans a first start measures: those that tell most about all others per second.

Under the log-normal priors of `adapt`, a measured time tells of the logarithms of the factors of
its parts as a linear regression does: its row has the shares of the parts in the time. The variance
that the measured plans leave to the predicted times of all plans does not depend on what is
measured. So plans can be chosen one by one, each being the one that lowers the variance most for
the time that it takes (a greedy Bayesian I-optimal design; see Chaloner and Verdinelli, Bayesian
experimental design: a review, Statistical Science 10, 1995).

Letters: N times of a plan, P parts of a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.calibration.disturbance import NOISE
from dlrm_sharded.calibration.factor_fit import PART_SPREAD, SHARED_SPREAD
from dlrm_sharded.calibration.observed import parts_by_stage
from dlrm_sharded.cost.communication import Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats, Workload


class Design:
    """The plans to choose from, and what is known after some of them are measured.

    Args:
        plans: the shards of each plan, and how its ranks lie on hosts.
        seconds: predicted time that each plan takes to measure.
    """

    def __init__(
        self,
        prior: LearnedCostModel,
        plans: Sequence[tuple[Workload, Hosts]],
        seconds: Sequence[float],
    ) -> None:
        parts = [parts_by_stage(prior, workload, hosts) for workload, hosts in plans]
        self._rows = [
            {stage: _rows(of_stage) for stage, of_stage in of_plan.items()} for of_plan in parts
        ]
        self._weights = [_weights(of_plan) for of_plan in parts]
        self._seconds = np.asarray(seconds)
        self._covariances = {
            stage: np.diag(_variances(of_stage.shape[1])) for stage, of_stage in parts[0].items()
        }
        # the variance of a time is that of a row; the mean over all rows needs their moments alone
        self._moments = {stage: self._moment(stage) / len(plans) for stage in self._covariances}

    def variance(self) -> float:
        """Return the mean variance of the logarithms of the plans' times, by their parts."""
        return float(
            sum((moment * self._covariances[name]).sum() for name, moment in self._moments.items())
        )

    def best(self, allowed: Sequence[int]) -> int:
        """Return the allowed plan that lowers the variance most for its time."""
        gains = [self._gain(index) / self._seconds[index] for index in allowed]
        return allowed[int(np.argmax(gains))]

    def measured(self, index: int) -> None:
        """Count a plan as measured."""
        for stage, rows in self._rows[index].items():
            self._covariances[stage] = _updated(self._covariances[stage], rows)

    def _gain(self, index: int) -> float:
        gain = 0.0
        for stage, rows in self._rows[index].items():
            if len(rows):
                before = self._covariances[stage]
                gain += float((self._moments[stage] * (before - _updated(before, rows))).sum())
        return gain

    def _moment(self, stage: str) -> Floats:
        """Return the sum of the weighted outer products of the rows of all plans."""
        size = len(self._covariances[stage])
        moment = np.zeros((size, size))
        for of_plan, weights in zip(self._rows, self._weights, strict=True):
            rows = of_plan[stage]
            if len(rows):
                moment += weights[stage] / len(rows) * rows.T @ rows
        return moment


def _rows(parts: Floats) -> Floats:
    """Return [N, 1 + P], the derivatives of the logarithms of times by those of the factors."""
    totals = parts.sum(axis=1)
    parts, totals = parts[totals > 0], totals[totals > 0]
    return np.column_stack([np.ones_like(totals), parts / totals[:, None]])


def _weights(parts: Mapping[str, Floats]) -> dict[str, float]:
    """Return the shares of the stages in a plan's predicted time; ids redistributed count, too."""
    times = {stage: float(of_stage.sum(axis=1).max()) for stage, of_stage in parts.items()}
    total = sum(times.values())
    return {stage: ms / total for stage, ms in times.items() if ms > 0}


def _variances(num_parts: int) -> NDArray[np.float64]:
    return np.array([SHARED_SPREAD**2, *[PART_SPREAD**2] * num_parts])


def _updated(covariance: Floats, rows: Floats) -> Floats:
    """Return the covariance after the times of rows [N, 1 + P] are measured."""
    if not len(rows):
        return covariance
    projected = rows @ covariance
    innovation = projected @ rows.T + NOISE**2 * np.eye(len(rows))
    updated: Floats = covariance - projected.T @ np.linalg.solve(innovation, projected)
    return updated
