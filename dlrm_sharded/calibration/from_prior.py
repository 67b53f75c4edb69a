"""Chooses between a model that is fitted alone and an adapted prior, by plans that neither saw.

A fit alone needs hundreds of plans, and a prior that suits the hardware needs a dozen. Which of the
two is better at a given number of plans depends on how much the hardware differs from the prior's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from dlrm_sharded.calibration.factor_fit import fit_factors
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.calibration.uncertainty import uncertainty_after
from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.compute import LOOKUP_STAGES
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.plan_cost import INPUT_DIST, PlanCost

log = logging.getLogger(__name__)

MIN_PLANS_ALONE = 100
"""Smallest number of plans of computation for which a fit alone is tried beside a prior."""

MIN_ADAPTED_PLANS = 10
"""Smallest number of plans for a prior, as some of them have to be held out."""

TEST_SHARE = 0.25
"""Share of the plans on which the two are compared; both are then fitted to all plans."""

Fit = Callable[[Sequence[Sample]], LearnedCostModel]


def adapted(prior: LearnedCostModel, samples: Sequence[Sample]) -> LearnedCostModel:
    """Return the prior, adapted to measured plans."""
    return fit_factors(prior, samples).applied(prior)


def with_uncertainty(model: LearnedCostModel, samples: Sequence[Sample]) -> LearnedCostModel:
    """Return a model that was fitted to samples with what they leave uncertain, if it has none.

    It is that of factors which would adapt the model to the samples once more. They are about 1.
    """
    if model.compute.uncertainty is not None:
        return model
    found = fit_factors(model, samples)
    uncertainty = uncertainty_after(model, found.information, found.confidence)
    compute = dataclasses.replace(model.compute, uncertainty=uncertainty)
    return dataclasses.replace(model, compute=compute)


def better_of_both(
    prior: LearnedCostModel, fit_alone: Fit, samples: Sequence[Sample], *, seed: int
) -> LearnedCostModel:
    """Return the model that predicts unseen plans better, for computation and exchanges apart."""
    moved = adapted(prior, samples)
    if sum(sample.kind == "computation" for sample in samples) < MIN_PLANS_ALONE:
        return moved
    numbers = sorted({sample.number for sample in samples})
    shuffled = np.random.default_rng(seed).permutation(numbers)
    unseen = set(shuffled[: int(TEST_SHARE * len(shuffled))].tolist())
    seen = [sample for sample in samples if sample.number not in unseen]
    tests = [sample for sample in samples if sample.number in unseen]
    trials = (adapted(prior, seen), fit_alone(seen))
    alone = fit_alone(samples)
    chosen = moved
    for part, errors_of in (("compute", _compute_errors), ("communication", _exchange_errors)):
        by_adapting, by_fitting = (_mean_error(trial, tests, errors_of) for trial in trials)
        log.info(
            "%s: the prior, adapted, is off by %.1f %% on unseen plans, a fit alone by %.1f %%",
            part,
            100 * by_adapting,
            100 * by_fitting,
        )
        if by_fitting < by_adapting:
            chosen = dataclasses.replace(chosen, **{part: getattr(alone, part)})
    return chosen


def _mean_error(
    model: LearnedCostModel,
    samples: Sequence[Sample],
    errors_of: Callable[[PlanCost, PlanCost], list[float]],
) -> float:
    """Return the mean of |log(predicted / measured)|; 0 without any time."""
    errors: list[float] = []
    for sample in samples:
        predicted = model.predict_workload(workload_of_sample(sample), sample.hosts)
        errors += errors_of(predicted, sample.cost)
    return float(np.mean(errors)) if errors else 0.0


def _compute_errors(predicted: PlanCost, measured: PlanCost) -> list[float]:
    return [
        error
        for ours, theirs in zip(predicted.per_rank, measured.per_rank, strict=True)
        for stage in LOOKUP_STAGES.values()
        for error in _log_error(ours.stage_ms(stage), theirs.stage_ms(stage))
    ]


def _exchange_errors(predicted: PlanCost, measured: PlanCost) -> list[float]:
    return [
        error
        for kind in EXCHANGES
        for error in (
            _log_error(predicted.input_dist_max_ms or 0.0, measured.input_dist_max_ms or 0.0)
            if kind == INPUT_DIST
            else _log_error(predicted.stage_max_ms(kind), measured.stage_max_ms(kind))
        )
    ]


def _log_error(predicted_ms: float, measured_ms: float) -> list[float]:
    """Return the error in a list, which is empty where nothing was measured."""
    if predicted_ms <= 0 or measured_ms <= 0:
        return []
    return [abs(float(np.log(predicted_ms / measured_ms)))]
