"""Adapts a cost model to hardware on which few plans were measured.

A predicted time is a sum of parts: the work terms of a direction, its launches, and what bytes and
latencies add to an exchange. The adapted time is the sum of the same parts times factors, which are
the maximum a posteriori estimate (MAP) under log-normal priors. A factor that all parts of a
direction share may be far from 1, as hardware is faster or slower as a whole; those of single parts
are pulled towards it, so that one run moves little more than the whole, and two minutes of
measurements what they decide. The same fit serves a first start, runs and calibrations, and what a
first start and runs have measured is fitted together (see `confidence` for how sure each is).

Letters: N measured times, W ranks, P parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import least_squares

from dlrm_sharded.calibration.confidence import (
    ERROR_OF_ONE,
    NOISE,
    Confidence,
    reliability,
)
from dlrm_sharded.calibration.outliers import NUM_AGREEING, Outlier, contradicting_plans
from dlrm_sharded.calibration.rank_errors import rank_error
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.calibration.uncertainty import information, uncertainty_after
from dlrm_sharded.cost.communication import EXCHANGES, Hosts
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.plans.plan_cost import DIRECTIONS, INPUT_DIST, PlanCost

MAX_LOG_FACTOR = 12.0
"""Limit of a factor's logarithm, so that no journal makes a time overflow."""

MAX_LEFT_OUT = 10
"""Number of the latest plans that are left out one after another to estimate the error."""

LEAST_MS = 1e-6
"""Time that stands for zero where outliers are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Factors of a model's parts: [2, P] of `ComputeModel.parts_ms`, and [P'] by exchange.

    Args:
        information: [2, P, P], what the measured times told of the logarithms of `compute`.
        confidence: how sure the prices were before.
    """

    compute: Floats
    exchanges: Mapping[str, Floats]
    information: Floats
    confidence: Confidence = field(default_factory=Confidence)

    def applied(self, model: LearnedCostModel) -> LearnedCostModel:
        """Return the model with its parts multiplied by the factors."""
        curves = model.exchange_curves
        return dataclasses.replace(
            model,
            compute=dataclasses.replace(
                model.compute.scaled(*self.compute),
                uncertainty=uncertainty_after(model, self.information, self.confidence),
            ),
            communication=model.communication.scaled(self.exchanges),
            exchange_curves=None if curves is None else curves.scaled(self.exchanges),
            correction={key: factors.tolist() for key, factors in self.by_part().items()},
        )

    def by_part(self) -> dict[str, Floats]:
        """Return the factors by direction and by exchange."""
        return {**dict(zip(DIRECTIONS, self.compute, strict=True)), **self.exchanges}


@dataclass(frozen=True, slots=True)
class _Observed:
    """Parts of predicted times [N, P], and the measured times [N], which may be 0.

    Args:
        reliability: weight of the times of this plan, see `confidence`.
    """

    parts: Floats
    times_ms: Floats
    reliability: float = 1.0


def fit_factors(prior: LearnedCostModel, samples: Sequence[Sample]) -> Factors:
    """Return the factors that bring a prior near the measured times of plans."""
    return _fitted([_observed(prior, sample) for sample in samples])


def error_of(model: LearnedCostModel, samples: Sequence[Sample]) -> float:
    """Return the mean error of predicted critical paths, as a ratio of times from 1: 0.5 is 1.5x.

    A prediction of a half and one of the double are equally far off. Disturbed plans count less.
    """
    return _mean([_off(model, sample) for sample in samples], samples)


def _mean(errors: Sequence[float], samples: Sequence[Sample]) -> float:
    return float(np.average(errors, weights=[reliability(sample.noise) for sample in samples]))


@dataclass(frozen=True, slots=True)
class Adapted:
    """An adapted model, and its error on the plans that it is adapted to, before and after.

    Args:
        expected_error: error on plans that were left out.
        stated_error: the same with one more plan that is off as far as the prices were expected to
            be before, since a few plans may agree by chance.
        rank_error: see `rank_errors`, on plans that were left out; None if they were too few.
        outliers: plans that the model is not adapted to, and which count in no error.
    """

    model: LearnedCostModel
    error_before: float
    error_after: float
    expected_error: float
    stated_error: float
    rank_error: float | None = None
    outliers: tuple[Outlier, ...] = ()

    @property
    def is_better(self) -> bool:
        return self.error_after < self.error_before


def adapt(
    prior: LearnedCostModel,
    samples: Sequence[Sample],
    *,
    start: Sequence[Sample] = (),
    confidence: Confidence | None = None,
) -> Adapted:
    """Adapt a prior to the measured times of plans, the latest last.

    Args:
        samples: at least one.
        start: plans of a first start, which are fitted together with the others; errors are those
            on the others, before them by the prices of the first start alone.
        confidence: how sure the prior is.
    """
    confidence = confidence or Confidence()
    fit = functools.partial(_fitted, confidence=confidence)
    started = [_observed(prior, sample) for sample in start]
    observed = [_observed(prior, sample) for sample in samples]
    outliers = _outliers(started, observed, fit)
    for index in sorted((outlier.index for outlier in outliers), reverse=True):
        observed.pop(index)
        samples = [*samples[:index], *samples[index + 1 :]]

    def adapted_to(plans: Sequence[Mapping[str, _Observed]]) -> LearnedCostModel:
        return fit(plans).applied(prior) if plans else prior

    model = adapted_to([*started, *observed])
    if not samples:  # a first start contradicts all of them
        return Adapted(model, 0.0, 0.0, confidence.error, confidence.error, outliers=outliers)
    before, after = error_of(adapted_to(started), samples), error_of(model, samples)
    is_known = bool(started) or not confidence.has_tails
    if len(samples) == 1 and not is_known:
        expected = max(after, ERROR_OF_ONE)
        return Adapted(model, before, after, expected, expected, outliers=outliers)
    left_out = range(max(0, len(samples) - MAX_LEFT_OUT), len(samples))
    pairs = []
    for place in left_out:
        others = [of_plan for i, of_plan in enumerate(observed) if i != place]
        cost = _predicted(adapted_to([*started, *others]), samples[place])
        pairs.append((cost, samples[place]))
    tested = [sample for _, sample in pairs]
    errors = [_off_of(cost, sample) for cost, sample in pairs]
    weights = [*(reliability(sample.noise) for sample in tested), 1.0]
    stated = float(np.average([*errors, confidence.error], weights=weights))
    return Adapted(model, before, after, _mean(errors, tested), stated, rank_error(pairs), outliers)


def _outliers(
    started: Sequence[Mapping[str, _Observed]],
    observed: Sequence[Mapping[str, _Observed]],
    fit: Callable[[Sequence[Mapping[str, _Observed]]], Factors],
) -> tuple[Outlier, ...]:
    """Return the plans beside a first start that contradict the others in some stage.

    See `contradicting_plans`.
    """
    plans = [*started, *observed]
    if len(plans) < NUM_AGREEING:  # which saves the fit
        return ()
    logs = {
        LOOKUP_STAGES.get(stage, stage): {
            index: _log_ratios(of_plan[stage], factors)
            for index, of_plan in enumerate(plans, start=-len(started))
            if len(of_plan[stage].times_ms)
        }
        for stage, factors in fit(plans).by_part().items()
    }
    return tuple(outlier for outlier in contradicting_plans(logs) if outlier.index >= 0)


def _log_ratios(observed: _Observed, factors: Floats) -> Floats:
    """Return [N], the logarithms of measured times over fitted ones."""
    logs: Floats = np.log(np.maximum(observed.times_ms, LEAST_MS)) - np.log(
        observed.parts @ factors
    )
    return logs


def _off(model: LearnedCostModel, sample: Sample) -> float:
    return _off_of(_predicted(model, sample), sample)


def _predicted(model: LearnedCostModel, sample: Sample) -> PlanCost:
    return model.predict_workload(workload_of_sample(sample), sample.hosts)


def _off_of(cost: PlanCost, sample: Sample) -> float:
    predicted, measured = cost.critical_path_ms, sample.cost.critical_path_ms
    if predicted <= 0 or measured <= 0:
        return 0.0 if predicted == measured else math.inf
    return math.expm1(abs(math.log(predicted) - math.log(measured)))


def parts_by_stage(prior: LearnedCostModel, workload: Workload, hosts: Hosts) -> dict[str, Floats]:
    """Return [W, P] parts of predicted times by direction and by exchange."""
    communication = prior.communication_at(EvenVolumes.of_workload(workload, hosts))
    parts = dict(zip(DIRECTIONS, prior.compute.parts_ms(workload), strict=True))
    for kind in EXCHANGES:
        exchange = workload.exchange(for_ids=kind == INPUT_DIST)
        parts[kind] = communication.parts_ms(kind, exchange, hosts)
    return parts


def _observed(prior: LearnedCostModel, sample: Sample) -> dict[str, _Observed]:
    """Return parts and times of the ranks that take part, by direction and exchange."""
    ranks = sample.cost.per_rank
    times = {
        direction: [rank.stage_ms(stage) for rank in ranks]
        for direction, stage in LOOKUP_STAGES.items()
    }
    times |= {kind: [getattr(rank, f"{kind}_ms", 0.0) for rank in ranks] for kind in EXCHANGES}
    times[INPUT_DIST] = list(sample.cost.input_dist_ms or ())
    found = {}
    for name, of_name in parts_by_stage(prior, workload_of_sample(sample), sample.hosts).items():
        measured = np.array(times[name])
        takes_part = of_name.sum(axis=1) > 0
        found[name] = _Observed(
            of_name[takes_part], measured[takes_part], reliability(sample.noise)
        )
    return found


def _fitted(
    observed: Sequence[Mapping[str, _Observed]], confidence: Confidence | None = None
) -> Factors:
    spreads = confidence or Confidence()

    def fitted(name: str) -> tuple[Floats, Floats]:
        of_name = [of_plan[name] for of_plan in observed]
        parts = np.concatenate([of_plan.parts for of_plan in of_name])
        times_ms = np.concatenate([of_plan.times_ms for of_plan in of_name])
        weights = _weights(of_name)
        has_log = times_ms > 0  # times of zero have no logarithm
        parts, times_ms, weights = parts[has_log], times_ms[has_log], weights[has_log]
        factors = _factors(parts, times_ms, weights, spreads)
        errors = np.log(parts @ factors) - np.log(times_ms)
        return factors, information(parts * factors, errors, weights)

    compute = [fitted(direction) for direction in DIRECTIONS]
    return Factors(
        compute=np.array([factors for factors, _ in compute]),
        exchanges={kind: fitted(kind)[0] for kind in EXCHANGES},
        information=np.array([found for _, found in compute]),
        confidence=spreads,
    )


def _weights(observed: Sequence[_Observed]) -> Floats:
    """Return [N], the weights of the times of plans.

    The ranks of a plan share what disturbs it. So a plan on many ranks tells no more than one on
    the median number of them, and does not outvote all others. A run's plan therefore counts as
    one of a first start, and less if it was measured beside other work.
    """
    nums = np.array([len(of_plan.times_ms) for of_plan in observed])
    usual = np.median(nums[nums > 0]) if nums.any() else 1.0
    by_plan = np.minimum(1.0, usual / np.maximum(nums, 1))
    by_plan = by_plan * [of_plan.reliability for of_plan in observed]
    weights: Floats = np.repeat(by_plan, nums)
    return weights


def _factors(parts: Floats, times_ms: Floats, weights: Floats, confidence: Confidence) -> Floats:
    """Return [P], the MAP estimate of the factors of parts [N, P]; ones without any time.

    The loss of a time is quadratic near its prediction and linear far from it (soft L1), so that a
    few absurd times do not decide. The logarithms of a prior's factors have the same loss: hardware
    of another kind differs in few parts, and in these by much.
    """
    num_parts, roots = parts.shape[1], np.sqrt(weights)
    if len(times_ms) == 0:
        return np.ones(num_parts)
    log_times = np.log(times_ms)

    spreads = np.array([confidence.shared_spread, *[confidence.part_spread] * num_parts])

    def residuals(logs: Floats) -> Floats:
        errors = (np.log(parts @ np.exp(logs[0] + logs[1:])) - log_times) / NOISE
        beyond = logs / spreads
        pull = _softened(beyond) if confidence.has_tails else beyond
        return np.concatenate([roots * _softened(errors), pull])

    def jacobian(logs: Floats) -> Floats:
        scaled = parts * np.exp(logs[0] + logs[1:])
        totals = scaled.sum(axis=1)
        errors = (np.log(totals) - log_times) / NOISE
        of_parts = scaled / totals[:, None] * (roots * _softened_slope(errors) / NOISE)[:, None]
        slopes = _softened_slope(logs / spreads) if confidence.has_tails else np.ones_like(logs)
        return np.vstack(
            [np.column_stack([of_parts.sum(axis=1), of_parts]), np.diag(slopes / spreads)]
        )

    start = np.zeros(1 + num_parts)
    start[0] = np.median(log_times - np.log(parts.sum(axis=1)))
    start[0] = np.clip(start[0], -MAX_LOG_FACTOR, MAX_LOG_FACTOR)
    fit = least_squares(residuals, start, jac=jacobian, method="lm")
    factors: Floats = np.exp(np.clip(fit.x[0] + fit.x[1:], -MAX_LOG_FACTOR, MAX_LOG_FACTOR))
    return factors


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
