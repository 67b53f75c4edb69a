"""Fits a cost model to collected samples, and writes it to a file for machines of the same kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_sharded.calibration.neuroshard_fit import fit_paper
from dlrm_sharded.calibration.prediction_errors import Errors, prediction_errors
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_fit import fit_samples
from dlrm_sharded.calibration.samples import COMPUTATION, CollectedCosts, workload_of_sample
from dlrm_sharded.cost import neuroshard
from dlrm_sharded.cost.features import EXTENT
from dlrm_sharded.cost.neuroshard import NeuroShardCostModel
from dlrm_sharded.cost.price_file import write_prices
from dlrm_sharded.files.errors import ConfigError, DataError, check_count
from dlrm_sharded.hardware.artifact import (
    ARTIFACT_SUFFIX,
    artifact_name,
    name_in_folder,
    write_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE, cost_model_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.standing import Standing

LEARNED = "learned"
MODELS = (LEARNED, neuroshard.KIND)
"""Kinds of models that can be fitted."""

MIN_PLANS = {LEARNED: 10, neuroshard.KIND: 100}
"""Smallest numbers of plans of computation for a fit."""

TEST_SHARE = 0.2
"""Share of the plans that networks are not trained on, but tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings of a fit.

    Args:
        model: one of `MODELS`.
        num_steps: steps of Adam, for networks.
    """

    model: str = LEARNED
    seed: int = 0
    num_steps: int = 1000

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"fit.model is {self.model!r}; known: {', '.join(MODELS)}")
        check_count("fit.seed", self.seed, least=0)
        check_count("fit.num_steps", self.num_steps, least=1)


def fit_collected(costs: CollectedCosts, config: FitConfig, out: Path) -> tuple[Path, Errors]:
    """Fit a model, and write it to a folder.

    Returns:
        The path of the file, and the errors on plans that the model was not fitted to.

    Raises:
        DataError: there are too few plans for a fit.
    """
    num_plans = len({s.number for s in costs.samples if s.kind == COMPUTATION})
    if num_plans < MIN_PLANS[config.model]:
        raise DataError(
            f"the collected costs have {num_plans} plans of computation, and a fit needs "
            f"{MIN_PLANS[config.model]}; measure for longer: {CALIBRATE[:-1]} minutes=10`"
        )
    return _fit_prior(costs, out) if config.model == LEARNED else _fit_nets(costs, config, out)


def _fit_prior(costs: CollectedCosts, out: Path) -> tuple[Path, Errors]:
    hardware, manifest = costs.hardware, costs.manifest
    prior = learned_cost_model(
        RunContext(manifest["device"], hardware, manifest["optimizer"]), warns=False
    )
    fitted = fit_samples(prior, costs.samples)
    standing = Standing(
        "calibrated",
        hardware.name,
        (f"{len(costs.samples)} plans were measured",),
        error=fitted.error,
        rank_error=fitted.rank_error,
    )
    model = dataclasses.replace(fitted.model, name=hardware.name, standing=standing)
    path = out / f"{artifact_name('prices', hardware.name)}{ARTIFACT_SUFFIX}"
    write_prices(path, model)
    return path, prediction_errors(fitted.left_out)


def _fit_nets(costs: CollectedCosts, config: FitConfig, out: Path) -> tuple[Path, Errors]:
    manifest = costs.manifest
    numbers = np.array(sorted({sample.number for sample in costs.samples}))
    chosen = np.random.default_rng(config.seed).random(len(numbers)) < TEST_SHARE
    chosen[0] = True
    unseen = set(numbers[chosen].tolist())
    seen = [sample for sample in costs.samples if sample.number not in unseen]
    nets = fit_paper(seen, seed=config.seed, num_steps=config.num_steps)
    model = NeuroShardCostModel(nets, name=costs.hardware.name, device=manifest["device"])
    errors = prediction_errors(
        (model.predict_workload(workload_of_sample(sample)), sample)
        for sample in costs.samples
        if sample.number in unseen
    )
    meta: dict[str, Any] = {
        "kind": neuroshard.KIND,
        **{key: manifest[key] for key in ("device", "cores", "versions", "commit", "optimizer")},
        **costs.hardware.to_meta(),
        "features": neuroshard.PAPER_FEATURES,
        "ranges": dict.fromkeys(EXTENT, (0.0, 0.0)),
        "measured_links": [],
        "held_out_errors": errors,
        "fit": dataclasses.asdict(config),
    }
    name = name_in_folder(out, cost_model_kind(neuroshard.KIND), costs.hardware)
    return write_artifact(out, name, neuroshard.to_arrays(nets), meta), errors
