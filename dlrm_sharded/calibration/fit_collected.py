"""Fits a cost model to samples, and writes it to a file for machines of the same kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm_sharded.calibration.neuroshard_fit import fit_paper
from dlrm_sharded.calibration.prediction_errors import Errors, prediction_errors
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.sample_fit import fit_samples
from dlrm_sharded.calibration.samples import COMPUTATION, Sample, workload_of_sample
from dlrm_sharded.cost import published_nets
from dlrm_sharded.cost.cost_model_file import write_cost_model
from dlrm_sharded.cost.features import EXTENT
from dlrm_sharded.cost.published_nets import NeuroShardCostModel
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.hardware.artifact import (
    ARTIFACT_SUFFIX,
    artifact_name,
    name_in_folder,
    write_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE, cost_model_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.cost_provenance import CostProvenance

MIN_FITTED = {"learned": 3, published_nets.KIND: 100}
"""Smallest numbers of plans of computation for a fit, by the kind of the model."""

TEST_SHARE = 0.2
"""Share of the plans on which networks are tested, not trained."""


def fit_learned(samples: Sequence[Sample], context: RunContext, out: Path) -> tuple[Path, Errors]:
    """Fit the prior of some hardware to samples, and write its costs to a folder.

    Returns:
        The path of the file, and the errors on plans that the model was not fitted to.

    Raises:
        DataError: there are too few plans for a fit.
    """
    _check_number(samples, "learned")
    fitted = fit_samples(learned_cost_model(context, warns=False), samples)
    assert context.hardware is not None
    name = context.hardware.name
    reasons = (f"{len(samples)} plans were measured",)
    provenance = CostProvenance(
        "calibrated", name, reasons, error=fitted.error, rank_error=fitted.rank_error
    )
    path = out / f"{artifact_name('prices', name)}{ARTIFACT_SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_cost_model(path, dataclasses.replace(fitted.model, name=name, provenance=provenance))
    return path, prediction_errors(fitted.left_out)


def fit_neuroshard(
    samples: Sequence[Sample], context: RunContext, out: Path, *, seed: int, num_steps: int
) -> tuple[Path, Errors]:
    """Train the published networks on most of the samples, as `fit_learned` fits a prior.

    Args:
        seed: of the networks, and of the plans that they are tested on.
        num_steps: steps of Adam.
    """
    _check_number(samples, published_nets.KIND)
    assert context.hardware is not None
    numbers = np.array(sorted({sample.number for sample in samples}))
    chosen = np.random.default_rng(seed).random(len(numbers)) < TEST_SHARE
    chosen[0] = True
    unseen = set(numbers[chosen].tolist())
    nets = fit_paper(
        [sample for sample in samples if sample.number not in unseen],
        seed=seed,
        num_steps=num_steps,
    )
    model = NeuroShardCostModel(nets, name=context.hardware.name, device=context.device)
    errors = prediction_errors(
        (model.predict_workload(workload_of_sample(sample)), sample)
        for sample in samples
        if sample.number in unseen
    )
    meta = {
        "kind": published_nets.KIND,
        "device": context.device,
        "versions": versions(),
        "commit": commit(),
        "optimizer": context.optimizer,
        **context.hardware.to_meta(),
        "features": published_nets.PAPER_FEATURES,
        "ranges": dict.fromkeys(EXTENT, (0.0, 0.0)),
        "measured_links": [],
        "held_out_errors": errors,
    }
    name = name_in_folder(out, cost_model_kind(published_nets.KIND), context.hardware)
    return write_artifact(out, name, published_nets.to_arrays(nets), meta), errors


def _check_number(samples: Sequence[Sample], kind: str) -> None:
    num_plans = len({sample.number for sample in samples if sample.kind == COMPUTATION})
    if num_plans < MIN_FITTED[kind]:
        raise DataError(
            f"{num_plans} plans of computation were measured, and a fit needs {MIN_FITTED[kind]}; "
            f"measure for longer: {CALIBRATE[:-1]} minutes=10`"
        )
