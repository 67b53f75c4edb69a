"""Fits a cost model to collected costs and evaluates it on held-out plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_sharded.calibration.factor_fit import with_sequences
from dlrm_sharded.calibration.fit_alone import (
    LookupData,
    fit_communication,
    fit_compute,
    fit_dense_gradients,
    fit_sequences,
)
from dlrm_sharded.calibration.from_prior import (
    MIN_ADAPTED_PLANS,
    better_of_both,
    with_uncertainty,
)
from dlrm_sharded.calibration.neuroshard_fit import fit_paper
from dlrm_sharded.calibration.prediction_errors import Predictor, averaged, compare
from dlrm_sharded.calibration.ranges import fitted_ranges, with_ranges_of
from dlrm_sharded.calibration.rank_errors import rank_error
from dlrm_sharded.calibration.samples import CollectedCosts, Sample, workload_of_sample
from dlrm_sharded.cost import learned, learned_arrays, neuroshard
from dlrm_sharded.cost.codecs import CodecTimes, codecs_to_array
from dlrm_sharded.cost.communication import LINKS, STEP_EXCHANGES, UNMEASURED, Hosts, with_stated
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.features import DEVICE_WORK
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.learned_arrays import DENSE_PRICES, SEQUENCE_PRICES
from dlrm_sharded.cost.neuroshard import NeuroShardCostModel
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.files.errors import ConfigError, DataError, check_count, check_number
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.hardware.artifact import Arrays
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE

MIN_PLANS = {"computation": 100, "communication": 50}
"""Smallest numbers of measured plans for a fit."""

MODELS = ("learned", "neuroshard")
"""Kinds of models that can be fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings of a fit.

    Args:
        model: one of `MODELS`.
        num_steps: steps of Adam.
        from_prior: whether the model may be a prior that is adapted, which few plans suffice for.
        holdout_share: fraction of the plans that the model is not fitted to; the artefact
            contains its errors on them.
    """

    model: str = "learned"
    seed: int = 0
    num_steps: int = 1000
    holdout_share: float = 0.2
    from_prior: bool = True

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"fit.model is {self.model!r}; known: {', '.join(MODELS)}")
        check_count("fit.seed", self.seed, least=0)
        check_count("fit.num_steps", self.num_steps, least=1)
        check_number("fit.holdout_share", self.holdout_share, above=True, most=0.5)
        if not isinstance(self.from_prior, bool):
            raise ConfigError(f"fit.from_prior is {self.from_prior!r}, must be true or false")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The content of a fitted model's artefact."""

    arrays: Arrays
    meta: dict[str, Any]


def fit_cost_model(
    costs: CollectedCosts, config: FitConfig, prior: LearnedCostModel | None = None
) -> Fitted:
    """Fit a model to most of the plans and compare its predictions with the others.

    Args:
        prior: a model of other hardware of the type of device, which is adapted where that predicts
            unseen plans better than a fit alone; None for a fit alone.

    Raises:
        DataError: there are too few plans for a fit.
    """
    fitted, held_out = split_held_out(costs, config, has_prior=prior is not None)
    ranges = fitted_ranges(fitted)
    if config.model == "learned":
        model = fit_learned(fitted, costs.manifest, config, prior)
        ranges = model.ranges
        arrays = {
            **learned_arrays.to_arrays(model.compute, model.communication),
            **_codec_arrays(costs.manifest),
        }
        kind = learned.KIND
        features: dict[str, list[str]] = learned_arrays.learned_features(costs.manifest["device"])
        predict = predictor(model)
    else:
        nets = fit_paper(fitted, seed=config.seed, num_steps=config.num_steps)
        arrays = neuroshard.to_arrays(nets)
        kind, features = neuroshard.KIND, neuroshard.PAPER_FEATURES
        hardware, device = costs.manifest["hardware"], costs.manifest["device"]
        predict = NeuroShardCostModel(nets, name=hardware, device=device).predict_workload
    error = rank_error(
        (predict(workload_of_sample(sample)), sample)
        for sample in held_out
        if sample.kind == "computation"
    )
    provenance_keys = ("device", "cores", "threads", "versions", "commit", "optimizer")
    meta = {
        "kind": kind,
        **{key: costs.manifest[key] for key in provenance_keys},
        **costs.hardware.to_meta(),
        "features": features,
        "ranges": ranges,
        "num_plans": {"fitted": len({s.number for s in fitted}), "held_out": len(held_out)},
        "held_out_errors": {
            name: pairs.summary() for name, pairs in compare(predict, held_out).items()
        },
        "rank_error": error,
        "repeatability": costs.manifest["repeatability"],
        "load_average": costs.manifest["load_average"],
        "num_disturbed": costs.manifest.get("num_disturbed", 0),
        "measured_links": list(measured_links(fitted)),
        "fit": dataclasses.asdict(config),
    }
    return Fitted(arrays, meta)


def _codec_arrays(manifest: dict[str, Any]) -> Arrays:
    """Return the measured times to convert what is exchanged; {} where none were measured."""
    damaged = "the manifest of the collected costs is damaged: codecs"
    codecs = read_form(manifest.get("codecs", {}), dict[str, CodecTimes], name=damaged)
    return {"codecs": codecs_to_array(codecs)} if codecs else {}


def fit_learned(
    samples: Sequence[Sample],
    manifest: dict[str, Any],
    config: FitConfig,
    prior: LearnedCostModel | None = None,
) -> LearnedCostModel:
    """Fit the calibrated model to samples, see `fit_cost_model`."""
    if prior is None:
        return with_uncertainty(_fitted_alone(samples, manifest, config), samples)
    model = better_of_both(
        prior, lambda seen: _fitted_alone(seen, manifest, config), samples, seed=config.seed
    )
    model = with_ranges_of(with_uncertainty(model, samples), samples)
    return dataclasses.replace(
        model,
        communication=with_stated(model.communication, measured=measured_links(samples)),
        name=manifest["hardware"],
        device=manifest["device"],
        measured_links=measured_links(samples),
        standing=None,
    )


def _fitted_alone(
    samples: Sequence[Sample], manifest: dict[str, Any], config: FitConfig
) -> LearnedCostModel:
    computation = [sample for sample in samples if sample.kind == "computation"]
    together = [sample for sample in samples if sample.world_size > 1]
    communication = UNMEASURED
    if together:
        communication = fit_communication(
            [workload_of_sample(sample) for sample in together],
            [exchange_times(sample) for sample in together],
            [sample.hosts for sample in together],
        )
    fused = [s for s in computation if not (s.has_replicas or s.has_sequences)]
    device = manifest["device"]
    compute = fit_compute(
        LookupData.from_samples(fused, DEVICE_WORK[device]),
        seed=config.seed,
        num_steps=config.num_steps,
    )
    model = LearnedCostModel(
        compute=_with_sequences(_with_dense_gradients(compute, computation, device), computation),
        communication=with_stated(communication, measured=measured_links(samples)),
        name=manifest["hardware"],
        device=manifest["device"],
        ranges=fitted_ranges(samples),
        measured_links=measured_links(samples),
    )
    if any(sample.has_sequences for sample in together):
        model = dataclasses.replace(model, communication=with_sequences(model, together))
    return model


def _with_dense_gradients(
    compute: ComputeModel, samples: Sequence[Sample], device: str
) -> ComputeModel:
    """Return the model with a price of dense gradients: the measured one, or that of the device."""
    replicated = [s for s in samples if s.has_replicas and not s.has_sequences]
    if not replicated:
        return dataclasses.replace(compute, dense=DENSE_PRICES[device])
    return fit_dense_gradients(
        compute,
        [workload_of_sample(sample) for sample in replicated],
        [_backward_ms(sample) for sample in replicated],
    )


def _with_sequences(compute: ComputeModel, samples: Sequence[Sample]) -> ComputeModel:
    """Return the model with a price of sequences: the measured one, or that of the device."""
    sequences = [sample for sample in samples if sample.has_sequences]
    if not sequences or compute.device.has_warps:
        device = "cuda" if compute.device.has_warps else "cpu"
        return dataclasses.replace(compute, sequences=SEQUENCE_PRICES[device])
    return fit_sequences(
        compute,
        [workload_of_sample(sample) for sample in sequences],
        [_backward_ms(sample) for sample in sequences],
    )


def _backward_ms(sample: Sample) -> Floats:
    """Return [W], times of a sample's backward computation."""
    return np.array([rank.bwd_compute_ms for rank in sample.cost.per_rank])


def measured_links(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return those of `LINKS` over which the ranks of any sample exchanged data."""
    used = {
        "intra": any(sample.ranks_per_host > 1 for sample in samples),
        "inter": any(sample.world_size > sample.ranks_per_host for sample in samples),
    }
    return tuple(link for link in LINKS if used[link])


def split_held_out(
    costs: CollectedCosts, config: FitConfig, *, has_prior: bool
) -> tuple[list[Sample], list[Sample]]:
    """Split the plans by the seed into fitted and held-out ones, which are averaged over attempts.

    Raises:
        DataError: there are too few plans.
    """
    for kind, min_plans in MIN_PLANS.items():
        if has_prior:
            min_plans = MIN_ADAPTED_PLANS
        num_plans = len(costs.first_attempts(kind))
        if num_plans < min_plans and (kind == "computation" or num_plans):
            raise DataError(
                f"the collected costs have {num_plans} plans of {kind}, a fit needs {min_plans}; "
                f"measure for longer: {CALIBRATE[:-1]} minutes=10`"
            )
    numbers = np.array(sorted({sample.number for sample in costs.samples}))
    chosen = np.random.default_rng(config.seed).random(len(numbers)) < config.holdout_share
    chosen[0] = True
    held_out = set(numbers[chosen].tolist())
    return (
        [sample for sample in costs.samples if sample.number not in held_out],
        averaged([sample for sample in costs.samples if sample.number in held_out]),
    )


def predictor(model: LearnedCostModel) -> Predictor:
    """Return the model as a function for `evaluate.compare`."""
    return lambda workload: model.predict_workload(
        workload, Hosts(workload.world_size, workload.ranks_per_host)
    )


def exchange_times(sample: Sample) -> Floats:
    """Return [3, W], times of a sample's exchanges in ms, in the order of `EXCHANGES`."""
    ranks = sample.cost.per_rank
    return np.array(
        [
            *([stages.stage_ms(kind) for stages in ranks] for kind in STEP_EXCHANGES),
            sample.cost.input_dist_ms,
        ]
    )
