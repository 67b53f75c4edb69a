"""How far the factors that adapt a model may be off, by the measurements that decided them.

Near the fitted factors, the logarithm of a time is linear in those of its parts' factors: its row
has the shares of the parts in the time (Laplace's approximation). A fit with the spreads S of the
factors as its prior then multiplies what was wrong before by P S^-1, and adds what the noise of the
times contributes, where P = (S^-1 + I)^-1, and I is the information in the times:

    C = P (S^-1 C_before S^-1 + I) P

which is P itself if the errors before the fit were the spreads (Joseph's form of the update of a
Kalman filter, which holds also for a prior that is not that of the errors).

Letters: N measured times, P parts.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.calibration.confidence import NOISE, Confidence
from dlrm_sharded.calibration.rank_errors import STANDARD_DEVIATIONS
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats

LEAST_TIMES = 12
"""Number of times from which on their own errors say how large the noise is, if above `NOISE`.

A smaller noise is not believed: times that were measured together err together, and what no factor
can express does not average out.
"""


def information(parts: Floats, log_errors: Floats, weights: Floats) -> Floats:
    """Return [P, P], the information that measured times have on the logarithms of factors.

    Args:
        parts: [N, P], of the fitted times.
        log_errors: [N], logarithms of fitted over measured times.
        weights: [N], how much each time counts, at most 1.
    """
    noise = NOISE
    if len(log_errors) >= LEAST_TIMES:
        # the median, as few absurd times say nothing of the others
        noise = max(noise, STANDARD_DEVIATIONS * float(np.median(np.abs(log_errors))))
    rows = parts / parts.sum(axis=1, keepdims=True)
    found: Floats = (rows.T * (weights / noise**2)) @ rows
    return found


def uncertainty_after(
    model: LearnedCostModel, found: Floats, confidence: Confidence
) -> Floats | None:
    """Return [2, P, P], see `ComputeModel.uncertainty`, after a fit of factors to a model.

    It is None for a calibration that does not say how certain it was, as older versions did not: it
    was nearer than the spreads of a prior.

    Args:
        found: [2, P, P], see `information`, by direction.
        confidence: spreads of the factors in the fit.
    """
    before, standing = model.compute.uncertainty, model.standing
    if before is None and standing is not None and standing.kind == "calibrated":
        return None
    earlier = [None] * len(found) if before is None else list(before)
    return np.stack(
        [covariance_after(*pair, confidence) for pair in zip(found, earlier, strict=True)]
    )


def covariance_after(found: Floats, before: Floats | None, confidence: Confidence) -> Floats:
    """Return [P, P], the covariance of the logarithms of the factors after a fit.

    Args:
        found: [P, P], see `information`.
        before: [P, P], the covariance before; None for that of the spreads.
        confidence: spreads of the factors in the fit.
    """
    num_parts = len(found)
    spreads = confidence.part_spread**2 * np.eye(num_parts) + confidence.shared_spread**2
    precision = np.linalg.inv(spreads)
    after = np.linalg.inv(precision + found)
    errors = precision if before is None else precision @ before @ precision
    covariance: Floats = after @ (errors + found) @ after
    return covariance
