"""Adapts a cost model to hardware on which few plans were measured.

The parts of a predicted time are multiplied by fitted factors (`factor_fit`). A factor that all
parts of a direction share may be far from 1, as hardware is faster or slower as a whole; those of
single parts are pulled towards it, so that one run moves little more than the whole, and two
minutes of measurements what they decide. The same fit serves a first start, runs and calibrations,
and what a first start and runs have measured is fitted together (see `confidence` for how sure each
is).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.calibration.confidence import ERROR_OF_ONE, Confidence, reliability
from dlrm_sharded.calibration.factor_fit import Factors, fitted_to
from dlrm_sharded.calibration.observed import Observed, observed_times
from dlrm_sharded.calibration.outliers import NUM_AGREEING, Outlier, contradicting_plans
from dlrm_sharded.calibration.ranges import with_ranges_of
from dlrm_sharded.calibration.rank_errors import rank_error
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.plan_cost import PlanCost

MAX_LEFT_OUT = 10
"""Number of the latest plans that are left out one after another to estimate the error."""

LEAST_MS = 1e-6
"""Time that stands for zero where outliers are looked for."""


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
    fit = functools.partial(fitted_to, confidence=confidence)
    started = [observed_times(prior, sample) for sample in start]
    observed = [observed_times(prior, sample) for sample in samples]
    outliers = _outliers(started, observed, fit)
    for index in sorted((outlier.index for outlier in outliers), reverse=True):
        observed.pop(index)
        samples = [*samples[:index], *samples[index + 1 :]]

    def adapted_to(plans: Sequence[Mapping[str, Observed]]) -> LearnedCostModel:
        return fit(plans).applied(prior) if plans else prior

    model = with_ranges_of(adapted_to([*started, *observed]), [*start, *samples])
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
    started: Sequence[Mapping[str, Observed]],
    observed: Sequence[Mapping[str, Observed]],
    fit: Callable[[Sequence[Mapping[str, Observed]]], Factors],
) -> tuple[Outlier, ...]:
    """Return the plans beside a first start that contradict the others in some stage.

    See `contradicting_plans`.
    """
    plans = [*started, *observed]
    if len(plans) < NUM_AGREEING:  # which saves the fit
        return ()
    logs = {
        LOOKUP_STAGES.get(stage, stage): {
            index: of_plan[stage].log_ratios(*found, least_ms=LEAST_MS)
            for index, of_plan in enumerate(plans, start=-len(started))
            if len(of_plan[stage].times_ms)
        }
        for stage, found in fit(plans).by_stage().items()
    }
    return tuple(outlier for outlier in contradicting_plans(logs) if outlier.index >= 0)


def _off(model: LearnedCostModel, sample: Sample) -> float:
    return _off_of(_predicted(model, sample), sample)


def _predicted(model: LearnedCostModel, sample: Sample) -> PlanCost:
    return model.predict_workload(workload_of_sample(sample), sample.hosts)


def _off_of(cost: PlanCost, sample: Sample) -> float:
    predicted, measured = cost.critical_path_ms, sample.cost.critical_path_ms
    if predicted <= 0 or measured <= 0:
        return 0.0 if predicted == measured else math.inf
    return math.expm1(abs(math.log(predicted) - math.log(measured)))
