"""Fits by how much a cost model is off on other hardware: factors of parts, and their slopes.

A predicted time is a sum of parts: the work terms of a direction, its launches, and what bytes and
latencies add to an exchange. The fitted time is the sum of the same parts times factors. The factor
of a term of work may also rise or fall with the access profile of its shard, because caches, page
tables and kernels of other hardware weigh rows and repeated ids differently; its logarithm is
linear in the profile, with a slope for each number of it. What bytes of sequences add to an
exchange has a factor in addition to those of its parts, and another one for row blocks. Factors and
slopes are the maximum a posteriori estimate (MAP) under log-normal priors.

On an Intel Xeon with AVX-512, whose update of a row takes many times what the packaged cost model
says, factors alone leave 12.7 % of a held-out rank's backward time open after ten minutes of
measurements, and slopes 6.2 %.

Letters: N measured times, S shards, W ranks, P parts, K those of them that are terms of work, C
numbers of a profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from dlrm_sharded.calibration.disturbance import NOISE
from dlrm_sharded.calibration.observed import OF_SEQUENCES, Observed, sums_by_time
from dlrm_sharded.cost.communication import EXCHANGES, STEP_EXCHANGES
from dlrm_sharded.cost.exchange_curves import Exchanges
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan_cost import DIRECTIONS

SHARED_SPREAD = 2.0
"""Standard deviation of the log of the factor that all parts share: e^2 is about 7 times."""

PART_SPREAD = 0.35
"""The same for the factor of one part besides the shared one.

With 0.5 and 0.7, plans that a fit had not seen were predicted better on an H200 (11.7 and 11.5 %
off in place of 12.1 %, 156 plans), and worse on an Intel Xeon (15.6 and not 14.0 %, 34 plans)."""

SLOPE_SPREAD = 0.3
"""Standard deviation of a slope, per standard deviation of a number of the profile. Between 0.2 and
0.5, the same errors changed by a tenth at most."""

MAX_LOG_FACTOR = 12.0
"""Limit of a factor's logarithm, so that no journal makes a time overflow."""

MAX_SLOPE, MAX_SEQUENCE_SLOPE = 1.0, 4.0
"""Limits of slopes: per standard deviation of a number of the profile, and for sequences."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Factors of a model's parts, and their slopes, by direction and by exchange.

    Args:
        factors: [P] of `ComputeModel.parts_ms` or `CommunicationModel.parts_ms`.
        slopes: [K, C], by how much the logarithm of the factor of a term of work rises with the
            scaled profile of a shard; [1, C] for an exchange, see `Observed`.
    """

    factors: Mapping[str, Floats]
    slopes: Mapping[str, Floats]

    def applied(self, model: LearnedCostModel) -> LearnedCostModel:
        """Return the model with its parts multiplied by the factors."""
        compute = model.compute.scaled(*(self.factors[of] for of in DIRECTIONS))
        return dataclasses.replace(
            model,
            compute=compute.sloped(*(self.slopes[of] for of in DIRECTIONS)),
            communication=_with_slopes(model.communication.scaled(self.factors), self.slopes),
            correction={name: factors.tolist() for name, factors in self.factors.items()},
        )


def fitted_to(observed: Sequence[Mapping[str, Observed]]) -> Factors:
    """Return the factors that fit the times of plans, each direction and exchange by itself."""
    found = {
        name: _fit(*_with_logs([of_plan[name] for of_plan in observed]))
        for name in (*DIRECTIONS, *EXCHANGES)
    }
    factors, slopes = ({name: of[i] for name, of in found.items()} for i in range(2))
    return Factors(factors, slopes)


def _with_slopes(model: Exchanges, slopes: Mapping[str, Floats]) -> Exchanges:
    """Return the model with `sequences` scaled by the slopes of exchanges."""
    logs = [slopes[kind][0] @ OF_SEQUENCES.T for kind in STEP_EXCHANGES]
    # what puts row blocks in order comes on top of the exchange of whole vectors
    counts = np.maximum.accumulate(model.sequences * np.exp(logs), axis=1)
    return dataclasses.replace(model, sequences=counts)


def _with_logs(observed: Sequence[Observed]) -> tuple[Observed, Floats]:
    """Return the times of all plans above zero, which have a logarithm, and their weights."""
    times, weights = _joined(observed), _weights(observed)
    has_log = times.times_ms > 0
    return times.where(has_log), weights[has_log]


def _joined(observed: Sequence[Observed]) -> Observed:
    """Return the times of all plans together."""
    first = np.cumsum([0, *(len(of_plan.times_ms) for of_plan in observed)])[:-1]
    return Observed(
        parts=np.concatenate([of_plan.parts for of_plan in observed]),
        time=np.concatenate([of_plan.time + i for of_plan, i in zip(observed, first, strict=True)]),
        profile=np.concatenate([of_plan.profile for of_plan in observed]),
        times_ms=np.concatenate([of_plan.times_ms for of_plan in observed]),
        num_terms=observed[0].num_terms,
    )


def _weights(observed: Sequence[Observed]) -> Floats:
    """Return [N], the weights of the times of plans.

    The ranks of a plan share what disturbs it. So a plan on many ranks says no more than one on
    the median number of them, and does not outvote all others. A run's plan therefore counts like
    one of a first run, and less if other work ran during its measurement.
    """
    nums = np.array([len(of_plan.times_ms) for of_plan in observed])
    usual = np.median(nums[nums > 0]) if nums.any() else 1.0
    by_plan = np.minimum(1.0, usual / np.maximum(nums, 1))
    by_plan = by_plan * [of_plan.reliability for of_plan in observed]
    weights: Floats = np.repeat(by_plan, nums)
    return weights


def _fit(observed: Observed, weights: Floats) -> tuple[Floats, Floats]:
    """Return the MAP estimate of factors [P] and slopes [K, C]; ones and zeros without any time.

    The loss of a time is quadratic near its prediction and linear far from it (soft L1), so that a
    few absurd times do not decide. The logarithms of a prior's factors have the same loss: hardware
    of another kind differs in few parts, and a lot in these.

    Args:
        weights: [N], how much each time counts.
    """
    no_factors, no_slopes = np.ones(observed.parts.shape[1]), observed.no_slopes
    num_parts, shape = len(no_factors), no_slopes.shape
    if len(observed.times_ms) == 0:
        return no_factors, no_slopes
    log_times, roots = np.log(observed.times_ms), np.sqrt(weights)
    spreads = np.repeat([SHARED_SPREAD, PART_SPREAD, SLOPE_SPREAD], [1, num_parts, no_slopes.size])

    def multiplied(logs: Floats) -> Floats:
        factors = np.exp(logs[0] + logs[1 : 1 + num_parts])
        return observed.multiplied(factors, logs[1 + num_parts :].reshape(shape))

    def residuals(logs: Floats) -> Floats:
        sums = sums_by_time(multiplied(logs), observed.time).sum(axis=1)
        errors = (np.log(sums) - log_times) / NOISE
        return np.concatenate([roots * _softened(errors), _softened(logs / spreads)])

    def jacobian(logs: Floats) -> Floats:
        found = multiplied(logs)
        by_profile = observed.sloped(found)[:, :, None] * observed.profile[:, None, :]
        found = np.column_stack([found, by_profile.reshape(len(found), -1)])
        sums = sums_by_time(found, observed.time)
        totals = sums[:, :num_parts].sum(axis=1)
        errors = (np.log(totals) - log_times) / NOISE
        weight = roots * _softened_slope(errors) / NOISE
        of_times = np.column_stack([totals, sums]) * (weight / totals)[:, None]
        return np.vstack([of_times, np.diag(_softened_slope(logs / spreads) / spreads)])

    start = np.zeros(len(spreads))
    start[0] = np.median(observed.log_ratios(no_factors, no_slopes))
    start[0] = np.clip(start[0], -MAX_LOG_FACTOR, MAX_LOG_FACTOR)
    logs = least_squares(residuals, start, jac=jacobian, method="lm").x
    of_parts = np.clip(logs[0] + logs[1 : 1 + num_parts], -MAX_LOG_FACTOR, MAX_LOG_FACTOR)
    limits = np.full(shape[1], MAX_SLOPE)
    limits[-1:] = MAX_SEQUENCE_SLOPE
    return np.exp(of_parts), np.clip(logs[1 + num_parts :].reshape(shape), -limits, limits)


def _softened(errors: Floats) -> Floats:
    """Return [N], residuals whose squares grow like the errors where these are large."""
    squares: Floats = 2.0 * (np.sqrt(1.0 + errors**2) - 1.0)
    return np.sign(errors) * np.sqrt(squares)


def _softened_slope(errors: Floats) -> Floats:
    """Return [N], the derivative of `_softened`."""
    roots = np.sqrt(1.0 + errors**2)
    # e / (root * softened(e)), which is 1 at e = 0; softened(e)^2 = 2 (root - 1)
    slopes: Floats = np.sqrt((roots + 1.0) / 2.0) / roots
    return slopes
