"""Fits a prior to all samples of some hardware, and says how far its predictions are off.

`factor_fit` makes the fit. Samples that contradict the others are left out of it. The stated error
is of critical paths of plans that a fit to the other plans had not seen. It is at least as large as
other work may have made it, and as that of each run among the last samples: runs mostly repeat one
plan, so leaving this plan out shows nothing, and load lasts from one run to the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.calibration.disturbance import reliability
from dlrm_sharded.calibration.factor_fit import MAX_LOG_FACTOR, Factors, fitted_to
from dlrm_sharded.calibration.observed import Observed, observed_times
from dlrm_sharded.calibration.samples import COMMUNICATION, RUN, Sample, workload_of_sample
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.cost.features import EXTENT, extent_of
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan_cost import PlanCost

NUM_FOLDS = 4
"""Parts of the samples, each of which is left out of a fit to estimate the error."""

ERROR_OF_ONE = 0.3
"""Error of one more plan, which counts in the stated error: a few plans may agree by chance."""

NUM_LAST = 3
"""Number of the last samples of which the largest error of a run is stated at least."""

LEAST_MS = 1e-6
"""Time that stands for zero where contradictions are looked for."""

OUTLIER_FACTOR = 3.0
"""A time that is less than this far from what the other samples suggest contradicts nothing."""

OUTLIER_SPREADS = 6.0
"""The same in standard deviations of the other samples, estimated by their median deviation."""

NUM_AGREEING, AGREEING_FACTOR = 3, 2.0
"""As many samples that agree with each other within this factor are not outliers: the hardware has
changed."""

LEAST_RANKS = 12
"""Number of ranks below which nothing is said about their errors."""

LEVEL = 0.7
"""Least time of a rank relative to the slowest of its plan. Only ranks that draw level decide which
one will be the slowest, and costs are further off where ranks have little in common."""

STANDARD_DEVIATIONS = 1.4826
"""Standard deviation of a normal distribution relative to its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A sample that contradicts the others.

    Args:
        index: its place among the samples.
        text: how far it is off, such as: bwd_compute 1000 times what the others suggest.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class SampleFit:
    """A model that was fitted to samples.

    Args:
        samples: those to which the model is fitted.
        error: expected relative error of a critical path: 0.5 is a factor of 1.5.
        rank_error: see `rank_error`, for the predictions in `left_out`.
        outliers: samples to which the model is not fitted; they count in `error` only if they are
            runs among the last samples.
        left_out: all other samples, each with its prediction by a fit that left it out.
    """

    model: LearnedCostModel
    samples: Sequence[Sample]
    error: float
    rank_error: float | None
    outliers: tuple[Outlier, ...]
    left_out: tuple[tuple[PlanCost, Sample], ...]


def fit_samples(prior: LearnedCostModel, samples: Sequence[Sample]) -> SampleFit:
    """Fit a prior to at least one sample."""
    last_runs = [sample for sample in samples[-NUM_LAST:] if sample.kind == RUN]
    observed = [observed_times(prior, sample) for sample in samples]
    factors = fitted_to(observed)
    outliers = find_outliers(observed, factors)
    if outliers:
        contradicting = {outlier.index for outlier in outliers}
        kept = [i for i in range(len(samples)) if i not in contradicting]
        samples, observed = [samples[i] for i in kept], [observed[i] for i in kept]
        factors = fitted_to(observed)
    pairs = tuple(_left_out(prior, samples, observed))
    model = with_ranges_of(factors.applied(prior), samples)
    error = max(
        _error_of(pairs),
        _error_of_load([sample.noise for sample in samples]),
        *(critical_path_error(_predicted(model, run), run) for run in last_runs),
    )
    return SampleFit(model, samples, error, rank_error(pairs), outliers, pairs)


def _error_of(pairs: Sequence[tuple[PlanCost, Sample]]) -> float:
    """Return the mean error of left-out samples, of which those under load count less."""
    errors = [critical_path_error(cost, sample) for cost, sample in pairs]
    weights = [reliability(sample.noise) for _, sample in pairs]
    weights.append(max(weights, default=1.0))
    return float(np.average([*errors, ERROR_OF_ONE], weights=weights))


def _error_of_load(noises: Sequence[float]) -> float:
    """Return the error that other work causes in the times of samples that count most."""
    noise = np.average(noises, weights=[reliability(noise) for noise in noises])
    return math.expm1(min(float(noise), MAX_LOG_FACTOR))


def _predicted(model: LearnedCostModel, sample: Sample) -> PlanCost:
    return model.predict_workload(workload_of_sample(sample), sample.hosts)


def _left_out(
    prior: LearnedCostModel, samples: Sequence[Sample], observed: Sequence[Mapping[str, Observed]]
) -> Iterator[tuple[PlanCost, Sample]]:
    """Yield predictions of all samples, each by a fit that has not seen it; none of a single plan.

    Samples of the same plan are in the same part.
    """
    plans = sorted({(sample.kind, sample.number) for sample in samples})
    # in no order of time, so that a part is as good as another one
    order = np.random.default_rng(0).permutation(len(plans)).tolist()
    part = {plan: place % NUM_FOLDS for plan, place in zip(plans, order, strict=True)}
    parts = [part[sample.kind, sample.number] for sample in samples]
    for number in range(NUM_FOLDS):
        others = [of for of, its in zip(observed, parts, strict=True) if its != number]
        if len(others) in (0, len(observed)):
            continue
        model = fitted_to(others).applied(prior)
        for sample, its in zip(samples, parts, strict=True):
            if its == number:
                yield _predicted(model, sample), sample


def critical_path_error(predicted: PlanCost, sample: Sample) -> float:
    """Return how far a critical path is off: half the measured time is as far off as twice it."""
    expected_ms, measured_ms = predicted.critical_path_ms, sample.cost.critical_path_ms
    if expected_ms <= 0 or measured_ms <= 0:
        return 0.0 if expected_ms == measured_ms else math.inf
    return math.expm1(abs(math.log(expected_ms / measured_ms)))


def find_outliers(
    observed: Sequence[Mapping[str, Observed]], factors: Factors
) -> tuple[Outlier, ...]:
    """Return the samples that are far from the median one in some stage, where few others are.

    Args:
        factors: those that fit all samples.
    """
    found: dict[int, Outlier] = {}
    for stage, slopes in factors.slopes.items():
        logs = {
            index: times.log_ratios(factors.factors[stage], slopes, least_ms=LEAST_MS)
            for index, of_sample in enumerate(observed)
            if len((times := of_sample[stage]).times_ms)
        }
        for pick in (np.max, np.min):  # the ratio of a single rank may be absurd
            ratios = np.array([pick(of_sample) for of_sample in logs.values()])
            for place in np.flatnonzero(_contradicted(ratios)):
                index, factor = list(logs)[place], math.exp(ratios[place] - np.median(ratios))
                name = LOOKUP_STAGES.get(stage, stage)
                text = f"{name} {factor:.3g} times what the others suggest"
                found.setdefault(index, Outlier(index, text))
    return tuple(found[index] for index in sorted(found))


def _contradicted(ratios: Floats) -> NDArray[np.bool_]:
    """Return [N], whether a logarithm is far from the median, where few others are."""
    if len(ratios) < NUM_AGREEING:
        return np.zeros(len(ratios), dtype=bool)
    deviations = np.abs(ratios - np.median(ratios))
    spread = STANDARD_DEVIATIONS * float(np.median(deviations))
    num_near = (np.abs(ratios[:, None] - ratios) < math.log(AGREEING_FACTOR)).sum(axis=1)
    is_far = deviations > max(math.log(OUTLIER_FACTOR), OUTLIER_SPREADS * spread)
    contradicted: NDArray[np.bool_] = is_far & (num_near < NUM_AGREEING)
    return contradicted


def rank_error(pairs: Iterable[tuple[PlanCost, Sample]]) -> float | None:
    """Return the standard deviation of the logarithms of ranks' computation over predicted ones.

    Only ranks of one plan are compared, so that neither the level of the costs nor a machine that
    is slower for a while counts, and only those that are about as slow as its slowest. The error is
    estimated by the median, which few disturbed ranks move.

    Args:
        pairs: predicted costs of measured plans that the model was not fitted to.

    Returns:
        None if there are too few such ranks.
    """
    deviations: list[float] = []
    num_plans = 0
    for predicted, sample in pairs:
        slowest_ms = max(rank.computation_ms for rank in predicted.per_rank)
        logs = [
            math.log(measured.computation_ms / expected.computation_ms)
            for expected, measured in zip(predicted.per_rank, sample.cost.per_rank, strict=True)
            if expected.computation_ms >= LEVEL * slowest_ms and measured.computation_ms > 0
        ]
        if len(logs) > 1:
            deviations += (np.array(logs) - np.mean(logs)).tolist()
            num_plans += 1
    if len(deviations) < LEAST_RANKS:
        return None
    median = STANDARD_DEVIATIONS * float(np.median(np.abs(deviations)))
    # the mean of a plan follows its ranks
    return median * math.sqrt(len(deviations) / (len(deviations) - num_plans))


def with_ranges_of(model: LearnedCostModel, samples: Sequence[Sample]) -> LearnedCostModel:
    """Return a model whose ranges also cover the samples to which it was fitted.

    Samples of communication do not count, because their tables are tiny.
    """
    workloads = [workload_of_sample(of) for of in samples if of.kind != COMMUNICATION]
    if not workloads:
        return model
    extents = np.array([extent_of(workload) for workload in workloads])
    lows, highs = extents[:, :, 0].min(axis=0).tolist(), extents[:, :, 1].max(axis=0).tolist()
    ranges = {
        name: (min(model.ranges[name][0], low), max(model.ranges[name][1], high))
        for name, low, high in zip(EXTENT, lows, highs, strict=True)
    }
    return dataclasses.replace(model, ranges=ranges)
