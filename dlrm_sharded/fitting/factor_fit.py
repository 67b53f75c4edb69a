"""Fits what a model's prices are off by on other hardware: factors of parts, and their slopes.

A predicted time is a sum of parts: the work terms of a direction, its launches, and what bytes and
latencies add to an exchange. The fitted time is the sum of the same parts times factors. The factor
of a term of work may also rise or fall with the access profile of its shard, as caches, page tables
and kernels of other hardware weigh rows and repeated ids differently; its logarithm is linear in
the profile, with a slope for each number of it. Factors and slopes are the maximum a posteriori
estimate (MAP) under log-normal priors.

On an Intel Xeon with AVX-512, whose update of a row takes many times what the packaged prices say,
factors alone leave 12.7 % of a held-out rank's backward time open after ten minutes of
measurements, and slopes 6.2 %.

Letters: N measured times, S shards, W ranks, P parts, K those of them that are terms of work, C
numbers of a profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from dlrm_sharded.cost.communication import EXCHANGES, Hosts
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.fitting.confidence import NOISE, Confidence, reliability
from dlrm_sharded.fitting.samples import Sample, workload_of_sample
from dlrm_sharded.fitting.uncertainty import information, uncertainty_after
from dlrm_sharded.plans.plan_cost import DIRECTIONS, INPUT_DIST

MAX_LOG_FACTOR = 12.0
"""Limit of a factor's logarithm, so that no journal makes a time overflow."""

MAX_SLOPE, MAX_SEQUENCE_SLOPE = 1.0, 4.0
"""Limits of slopes: per standard deviation of a number of the profile, and for sequences."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Measured times [N] of one plan, and the parts of what is predicted for them.

    Args:
        parts: [S, P], of shards; of whole ranks [N, P] for exchanges.
        time: [S], the time to which a row of `parts` adds; never falling, and each occurs.
        profile: [S, C], scaled, the last number is 1 for sequences; [S, 0] where nothing has a
            slope.
        num_terms: K, the first parts, which have slopes.
        times_ms: [N], which may be 0.
        reliability: weight of the times of this plan, see `confidence`.
    """

    parts: Floats
    time: NDArray[np.int64]
    profile: Floats
    times_ms: Floats
    num_terms: int = 0
    reliability: float = 1.0

    def multiplied(self, factors: Floats, slopes: Floats | None) -> Floats:
        """Return [S, P], the parts times factors [P] with slopes [K, C]."""
        found: Floats = self.parts * factors
        if slopes is not None:
            found[:, : len(slopes)] *= np.exp(self.profile @ slopes.T)
        return found

    def log_ratios(
        self, factors: Floats, slopes: Floats | None, *, least_ms: float = 0.0
    ) -> Floats:
        """Return [N], the logarithms of measured times over the sums of multiplied parts."""
        sums = sums_by_time(self.multiplied(factors, slopes), self.time).sum(axis=1)
        logs: Floats = np.log(np.maximum(self.times_ms, least_ms)) - np.log(sums)
        return logs

    def where(self, is_kept: NDArray[np.bool_]) -> Observed:
        """Return the times with `is_kept` [N]."""
        rows = is_kept[self.time]
        place = np.cumsum(is_kept) - 1
        return dataclasses.replace(
            self,
            parts=self.parts[rows],
            time=place[self.time[rows]],
            profile=self.profile[rows],
            times_ms=self.times_ms[is_kept],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Factors of a model's parts: [2, P] of `ComputeModel.parts_ms`, and [P'] by exchange.

    Args:
        information: [2, P, P], what the measured times told of the logarithms of `compute`.
        confidence: how sure the prices were before.
        slopes: [2, K, C], by how much the logarithm of the factor of a term of work rises with the
            scaled profile of a shard; None for not at all.
    """

    compute: Floats
    exchanges: Mapping[str, Floats]
    information: Floats
    confidence: Confidence = field(default_factory=Confidence)
    slopes: Floats | None = None

    def applied(self, model: LearnedCostModel) -> LearnedCostModel:
        """Return the model with its parts multiplied by the factors."""
        curves = model.exchange_curves
        compute = model.compute.scaled(*self.compute)
        return dataclasses.replace(
            model,
            compute=dataclasses.replace(
                compute if self.slopes is None else compute.sloped(*self.slopes),
                uncertainty=uncertainty_after(model, self.information, self.confidence),
            ),
            communication=model.communication.scaled(self.exchanges),
            exchange_curves=None if curves is None else curves.scaled(self.exchanges),
            correction={key: factors.tolist() for key, (factors, _) in self.by_stage().items()},
        )

    def by_stage(self) -> dict[str, tuple[Floats, Floats | None]]:
        """Return factors and slopes by direction and by exchange, which has no slopes."""
        slopes = [None] * len(DIRECTIONS) if self.slopes is None else list(self.slopes)
        of_lookups = zip(DIRECTIONS, zip(self.compute, slopes, strict=True), strict=True)
        return dict(of_lookups) | {kind: (of, None) for kind, of in self.exchanges.items()}


def fit_factors(prior: LearnedCostModel, samples: Sequence[Sample]) -> Factors:
    """Return the factors that bring a prior near the measured times of plans."""
    return fitted_to([observed_times(prior, sample) for sample in samples])


def observed_times(prior: LearnedCostModel, sample: Sample) -> dict[str, Observed]:
    """Return parts and times of the ranks that take part, by direction and exchange."""
    ranks, weight = sample.cost.per_rank, reliability(sample.noise)
    workload = workload_of_sample(sample)
    found = {
        direction: _of_lookups(
            parts, workload, prior, np.array([rank.stage_ms(stage) for rank in ranks]), weight
        )
        for (direction, stage), parts in zip(
            LOOKUP_STAGES.items(), prior.compute.shard_parts_ms(workload), strict=True
        )
    }
    times = {kind: [getattr(rank, f"{kind}_ms", 0.0) for rank in ranks] for kind in EXCHANGES}
    times[INPUT_DIST] = list(sample.cost.input_dist_ms or ())
    for kind, parts in _exchange_parts(prior, workload, sample.hosts).items():
        takes_part, nothing = parts.sum(axis=1) > 0, np.zeros((len(parts), 0))
        every = Observed(
            parts, np.arange(len(parts)), nothing, np.array(times[kind]), reliability=weight
        )
        found[kind] = every.where(takes_part)
    return found


def parts_by_stage(prior: LearnedCostModel, workload: Workload, hosts: Hosts) -> dict[str, Floats]:
    """Return [W, P] parts of predicted times by direction and by exchange."""
    parts = dict(zip(DIRECTIONS, prior.compute.parts_ms(workload), strict=True))
    return parts | _exchange_parts(prior, workload, hosts)


def fitted_to(
    observed: Sequence[Mapping[str, Observed]], confidence: Confidence | None = None
) -> Factors:
    """Return the factors that fit the times of plans, each direction and exchange by itself."""
    spreads = confidence or Confidence()
    found: dict[str, tuple[Floats, Floats]] = {}
    told: list[Floats] = []
    for name in (*DIRECTIONS, *EXCHANGES):
        of_name = [of_plan[name] for of_plan in observed]
        times, weights = _joined(of_name), _weights(of_name)
        has_log = times.times_ms > 0  # times of zero have no logarithm
        times, weights = times.where(has_log), weights[has_log]
        found[name] = _fit(times, weights, spreads)
        if name in DIRECTIONS:
            parts = sums_by_time(times.multiplied(*found[name]), times.time)
            told.append(information(parts, -times.log_ratios(*found[name]), weights))
    factors, slopes = zip(*(found[direction] for direction in DIRECTIONS), strict=True)
    return Factors(
        compute=np.array(factors),
        exchanges={kind: found[kind][0] for kind in EXCHANGES},
        information=np.array(told),
        confidence=spreads,
        slopes=np.array(slopes),
    )


def _exchange_parts(prior: LearnedCostModel, workload: Workload, hosts: Hosts) -> dict[str, Floats]:
    """Return [W, P] parts of the predicted times of every exchange."""
    communication = prior.communication_at(EvenVolumes.of_workload(workload, hosts))
    return {
        kind: communication.parts_ms(kind, workload.exchange(for_ids=kind == INPUT_DIST), hosts)
        for kind in EXCHANGES
    }


def _of_lookups(
    parts: tuple[Floats, Floats],
    workload: Workload,
    prior: LearnedCostModel,
    times_ms: Floats,
    weight: float,
) -> Observed:
    """Return the lookups of ranks with shards: a row for each shard, and one for launches.

    Args:
        parts: of shards [S, P], and launches of ranks [W, P].
        times_ms: [W].
    """
    of_shards, of_launches = parts
    profile = prior.compute.scaled_profile(workload)
    rank = np.concatenate([workload.rank, np.arange(len(of_launches))])
    order = np.argsort(rank, kind="stable")
    every = Observed(
        parts=np.concatenate([of_shards, of_launches])[order],
        time=rank[order],
        profile=np.concatenate([profile, np.zeros((len(of_launches), profile.shape[1]))])[order],
        times_ms=times_ms,
        num_terms=len(prior.compute.device.terms),
        reliability=weight,
    )
    return every.where(np.bincount(workload.rank, minlength=len(of_launches)) > 0)


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


def sums_by_time(values: Floats, time: NDArray[np.int64]) -> Floats:
    """Return [N, ...], sums of the rows [S, ...] of each time; see `Observed.time`."""
    if not len(time):
        return values
    first = np.flatnonzero(np.diff(time, prepend=-1))
    sums: Floats = np.add.reduceat(values, first, axis=0)
    return sums


def _weights(observed: Sequence[Observed]) -> Floats:
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


def _fit(observed: Observed, weights: Floats, confidence: Confidence) -> tuple[Floats, Floats]:
    """Return the MAP estimate of factors [P] and slopes [K, C]; ones and zeros without any time.

    The loss of a time is quadratic near its prediction and linear far from it (soft L1), so that a
    few absurd times do not decide. The logarithms of a prior's factors have the same loss: hardware
    of another kind differs in few parts, and in these by much.

    Args:
        weights: [N], how much each time counts.
    """
    num_parts, shape = observed.parts.shape[1], (observed.num_terms, observed.profile.shape[1])
    if len(observed.times_ms) == 0:
        return np.ones(num_parts), np.zeros(shape)
    log_times, roots = np.log(observed.times_ms), np.sqrt(weights)
    spreads = np.repeat(
        [confidence.shared_spread, confidence.part_spread, confidence.slope_spread],
        [1, num_parts, shape[0] * shape[1]],
    )

    def multiplied(logs: Floats) -> Floats:
        factors = np.exp(logs[0] + logs[1 : 1 + num_parts])
        return observed.multiplied(factors, logs[1 + num_parts :].reshape(shape))

    def residuals(logs: Floats) -> Floats:
        sums = sums_by_time(multiplied(logs), observed.time).sum(axis=1)
        errors = (np.log(sums) - log_times) / NOISE
        beyond = logs / spreads
        pull = _softened(beyond) if confidence.has_tails else beyond
        return np.concatenate([roots * _softened(errors), pull])

    def jacobian(logs: Floats) -> Floats:
        found = multiplied(logs)
        by_profile = found[:, : shape[0], None] * observed.profile[:, None, :]
        found = np.column_stack([found, by_profile.reshape(len(found), -1)])
        sums = sums_by_time(found, observed.time)
        totals = sums[:, :num_parts].sum(axis=1)
        errors = (np.log(totals) - log_times) / NOISE
        weight = roots * _softened_slope(errors) / NOISE
        of_times = np.column_stack([totals, sums]) * (weight / totals)[:, None]
        slopes = _softened_slope(logs / spreads) if confidence.has_tails else np.ones_like(logs)
        return np.vstack([of_times, np.diag(slopes / spreads)])

    start = np.zeros(len(spreads))
    start[0] = np.median(observed.log_ratios(np.ones(num_parts), None))
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
